"""Comparisons: profiles side by side on the same work, what each could reach at best, and pictures of where time goes."""
