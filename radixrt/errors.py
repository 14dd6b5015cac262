"""Every exception that radixrt raises on purpose. Catch `RadixrtError` to catch them all.

The layers below (`triton_ops`, `memory_pool`, `layers`) raise built-in exceptions.
"""

# Tests: tests/test_origin.py


class RadixrtError(Exception):
    """Base of all errors of radixrt."""


class ParameterError(RadixrtError, ValueError):
    """A parameter is outside its bounds; the message names it, its value and the bound."""


class FormError(ParameterError):
    """An answer cannot have a form: no engine takes it, or it passes a limit. The message says why."""


class PromptError(RadixrtError, ValueError):
    """One or more prompts of a call cannot be run; the message names each of them. Nothing has run."""


class ContextLengthError(PromptError):
    """A prompt has more tokens than the context takes, or a list of prompts has none but such."""


class ModelError(RadixrtError):
    """A model folder, its config or its weights cannot be used."""


class TokenizerError(RadixrtError):
    """A tokenizer cannot be loaded, or cannot encode or decode what it was given."""


class BatchFileError(RadixrtError):
    """An input or output file of a batch cannot be used."""


class ReaderGoneError(BatchFileError):
    """The reader of the records on standard output has gone, such as `head`."""


class JournalError(BatchFileError):
    """The disk failed a batch while it ran. What was counted as durable is kept, and the same batch can go on."""


class CacheFileError(RadixrtError):
    """A kept cache cannot be written, or is not one that this model can use; the message says why."""


class PassError(RadixrtError):
    """A forward pass failed. Its requests have ended with an error; the others can go on.

    The exception that the pass raised is the `__cause__`.
    """


class DeviceLostError(RadixrtError):
    """The device computes no more, after an illegal access or a fault of its own. No request was ended for it.

    Only a new process can use the device again. What the pass had raised is the `__cause__`.
    """


class ReplicaLostError(RadixrtError):
    """The process of a replica has ended or hangs. Its requests have not run to their end: others can run them."""


class ErrorRateError(RadixrtError):
    """More lines of a batch have error records than `max_error_rate` allows. A higher rate goes on with it."""


class SchedulerError(RadixrtError):
    """Nothing can run and nothing is running, though requests wait: a defect of radixrt."""
