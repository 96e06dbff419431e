"""Every exception kdit raises on purpose.

    KditError                      base; ``except KditError`` catches all of them
    ├── ConfigError                a setting is wrong                           (also ValueError)
    │   └── UnsupportedOptionError a setting the chosen family cannot honour
    ├── InputError                 prompt, size, image, seed of one request     (also ValueError)
    ├── GraphError                 a PipelineDef that cannot run                (also ValueError)
    ├── PinTypeError               tensor pin joined to model pin               (also TypeError)
    ├── PinError                   undeclared or unconnected pin, absent tensor (also KeyError)
    ├── RegistryError              unknown or duplicate name in a registry      (also KeyError)
    ├── CheckpointError            weights or config files that cannot be used  (also ValueError)
    │   └── CheckpointMissingError a file or folder that is not there           (also FileNotFoundError)
    ├── OutputError                a result that cannot be written              (also OSError)
    ├── NonFiniteError             NaN or infinity in a result                  (also ArithmeticError)
    └── Cancelled                  the caller asked to stop between two steps

Each is also the builtin that callers of a plain Python library would expect. Messages say what was
got, what was expected and where. Names of settings stand between backquotes (`SampleConfig.steps`), in whose place the
command line puts its options (kdit/cli/option_names.py). It prints a message in one line, and below it the table that
a CheckpointError may have; a server maps the first group (everything but NonFiniteError and Cancelled) to 4xx.
"""


class KditError(Exception):
    """Base of every deliberate error. The first argument is the whole message."""

    def __str__(self) -> str:  # KeyError would print the repr, with quotes around it
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(KditError, ValueError):
    """A configuration value is wrong by itself or in combination."""


class UnsupportedOptionError(ConfigError):
    """A valid option that the chosen family does not support; raised before any weight is loaded."""


class InputError(KditError, ValueError):
    """What one request asks for cannot be made: prompt, size, image, seed, fed tensor."""


class GraphError(KditError, ValueError):
    """A pipeline graph that cannot run: cycle, dangling model pin, second edge into one pin."""


class PinTypeError(KditError, TypeError):
    """A tensor pin was joined to a model pin."""


class PinError(KditError, KeyError):
    """A pin that the node does not declare, that is not connected, or whose tensor is gone."""


class RegistryError(KditError, KeyError):
    """A name that is registered twice or not at all."""


class CheckpointError(KditError, ValueError):
    """Files of a checkpoint that are damaged, foreign, incomplete or do not fit the network.

    ``table``: lines about single components, which follow the message.
    """

    def __init__(self, message: str, *, table: str = "") -> None:
        super().__init__(message)
        self.table = table

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.table}" if self.table else super().__str__()


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """A folder, component or shard of a checkpoint that is not on disk."""


class OutputError(KditError, OSError):
    """The result cannot be written to the requested place."""


class NonFiniteError(KditError, ArithmeticError):
    """NaN or infinity appeared; the message names the stage and, in the loop, the step."""


class Cancelled(KditError):
    """The request was cancelled between two denoising steps."""
