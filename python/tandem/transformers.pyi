from tandem.compat.transformers import *  # noqa: F403
