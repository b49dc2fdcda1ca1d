from tandem.compat.transformer_engine import *  # noqa: F403
