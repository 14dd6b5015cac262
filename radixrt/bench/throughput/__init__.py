"""The engine on lists of prompts beside the bound, its goals, itself with parts switched off, and transformers."""
