"""linearize: softmax attention of pretrained causal language models in linear time."""
