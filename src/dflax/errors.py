"""The one exception that means "the input is at fault": the command line prints its text and exits with code 2."""


class DflaxError(Exception):
    """A bad input, told in one clear line that names the thing at fault and the fix."""
