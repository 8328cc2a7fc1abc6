"""What is made of recorded runs for people elsewhere: pages and traces, each one file that needs no
network."""
