# Ends with success while children go on writing, one of them the right answer, after the end.
read -r n
sum=0
for ((i = 0; i < ${#n}; i++)); do ((sum += ${n:i:1} * ${n:i:1})); done
(trap '' HUP TERM; sleep 0.7; echo "$sum"; sleep 60) &
exit 0
