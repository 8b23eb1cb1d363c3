"""What is kept of a training, as trees and tensors, and how it is put back."""
