"""What a step holds and costs, without running it: plans, the closed form, and the searches made of them."""
