from dovetail import hookimpl
from dovetail_wreck import component


@hookimpl
def dovetail_component():
    return [component("scheduler", "unheard", "scheduler/0.3")]
