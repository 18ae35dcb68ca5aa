"""What a conversation's tools may do: a checked action, what is allowed without asking, and the folder."""
