"""Tool calls in what a model writes: one scanner a family, all behind `base.ToolParser`."""
