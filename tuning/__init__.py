"""The autotuner, installed as `cuflash.tuning`: searches tile configurations on the GPU at hand."""
