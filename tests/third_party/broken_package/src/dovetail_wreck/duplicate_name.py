"""Uses the name of a built-in component that is not the default of its kind."""

from dovetail import hookimpl
from dovetail_wreck import component


@hookimpl
def dovetail_components():
    return [component("scheduler", "static", "scheduler/0.3")]
