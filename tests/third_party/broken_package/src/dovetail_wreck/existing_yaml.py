"""Three files with taken names: a component's, a variant's and a preset's."""

from dovetail import hookimpl


@hookimpl
def dovetail_config_dirs():
    return ["pkg://dovetail_wreck.conf"]
