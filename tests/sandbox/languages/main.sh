IFS= read -r command
deep() { if (($1 == 0)); then depth=0; else deep $(($1 - 1)); depth=$((depth + 1)); fi; }
endless() { endless; }
case $command in
  "") echo empty ;;
  length) wc -c ;;
  echo) cat ;;
  fail) echo "boom 42" >&2; exit 3 ;;
  bytes) printf '\xff\xfe' ;;
  threads) for i in 1 2 3 4; do seq 0 99 & done | awk '{ s += $1 } END { print s }' ;;
  deep) read -r n; deep "$n"; echo "$depth" ;;
  endless) endless ;;
  memory) s=x; while true; do s=$s$s; done ;;
  files) count=0; read -r paths
    for path in $paths; do [ -n "$(cat "$path" 2>/dev/null || ls "$path" 2>/dev/null)" ] && count=$((count + 1)); done
    echo $count ;;
esac
