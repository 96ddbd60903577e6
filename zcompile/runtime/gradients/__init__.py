"""The gradients package makes `.grad` of what backward computes, in the order in which autograd
sums."""
