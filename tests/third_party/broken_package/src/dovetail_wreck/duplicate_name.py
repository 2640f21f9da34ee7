"""A name that a built-in component has, and not the default of its kind."""

from dovetail import hookimpl
from dovetail_wreck import component


@hookimpl
def dovetail_components():
    return [component("scheduler", "static", "scheduler/0.1")]
