"""Operations in which several GPUs take part."""
