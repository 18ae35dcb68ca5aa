"""Routes for stored chats: the page uses them, and so may any other front end."""
