"""The state of training, as trees and tensors, and how it is restored."""
