"""Every option once, as data: the parser, the documentation and the checks are made from it.

Knows flags, the configuration file and the environment, and is the only part that reads them. Knows
nothing of what the values do: `launch.py` hands each part its piece.

option.py       what an option is
options.py      Config: the options that are served
accepted*.py    flags of other servers whose feature is not here: answered with what is used instead
parse.py        command line and YAML file to Config
environment.py  the environment
"""
