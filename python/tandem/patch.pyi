from tandem.compat.patch import *  # noqa: F403
