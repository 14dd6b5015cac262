"""How long every kernel takes on a GPU, beside what the GPU allows and what others need for the same."""
