from dovetail import hookimpl
from dovetail_wreck import component


@hookimpl
def dovetail_components():
    return [component("scheduler", "bygone", "scheduler/9.0")]
