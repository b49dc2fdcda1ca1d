from tandem.compat.flex import *  # noqa: F403
