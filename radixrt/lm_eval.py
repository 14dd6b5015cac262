"""The documented name of `radixrt.integrations.lm_eval`."""

# Tests: tests/integrations/test_lm_eval.py

import sys

try:
    from radixrt.integrations.lm_eval import RadixLM, main
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"radixrt: error: {error}", file=sys.stderr)
    sys.exit(2)

__all__ = ["RadixLM", "main"]

if __name__ == "__main__":
    main()
