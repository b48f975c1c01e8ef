"""What training tells the outside: events, log lines, rates."""
