"""Target features and vocabulary maps as other trainers write them."""
