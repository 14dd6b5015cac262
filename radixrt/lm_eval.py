"""The documented name of `radixrt.integrations.lm_eval`."""

from radixrt.integrations.lm_eval import RadixLM, main

__all__ = ["RadixLM", "main"]

if __name__ == "__main__":
    main()
