"""How weights come about: data, distillation, losses and the training loop."""
