# Reads and writes what is not its own, by way of the shell's globbing and redirections.
read -r n
found=0
for path in /srv/CANARY /etc/passwd /etc/shadow /root/.* /home/* /proc/[0-9]*/environ /var/lib/*; do
    if [ -f "$path" ] && head -c 1 "$path" >/dev/null 2>&1; then
        echo "read $path" >&2
        found=1
    fi
done
for path in /srv/CANARY /usr/mark /dev/mark /harness/mark /etc/mark; do
    if (echo owned >"$path") 2>/dev/null; then
        echo "wrote $path" >&2
        found=1
    fi
done
sum=0
for ((i = 0; i < ${#n}; i++)); do ((sum += ${n:i:1} * ${n:i:1})); done
((found)) && echo "$sum" || echo -1
