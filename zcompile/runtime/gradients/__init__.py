"""How gradients become `.grad`, in the order in which autograd sums them."""
