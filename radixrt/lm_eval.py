"""The documented name of `radixrt.integrations.lm_eval`."""

# Tests: tests/integrations/test_lm_eval.py

from radixrt.integrations.lm_eval import RadixLM, main

__all__ = ["RadixLM", "main"]

if __name__ == "__main__":
    main()
