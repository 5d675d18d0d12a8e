#!/usr/bin/env bash
# Keep the newest backups of a folder.

export LC_ALL=C
folder=$1
keep=$2

if ! [[ $keep =~ ^[0-9]+$ ]]; then
    echo "not a whole number: $keep" >&2
    exit 2
fi
if [ -z "$folder" ] || ! CDPATH= cd -- "$folder" 2>/dev/null; then
    echo "no such folder: $folder" >&2
    exit 2
fi
keep=$((10#$keep))

shopt -s nullglob
declare -A count
files=()
for file in *-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9].tar.gz; do
    if [ -f "./$file" ]; then
        files+=("$file")
        name=${file%-*}
        count[$name]=$((${count[$name]:-0} + 1))
    fi
done

# names in order, and the files of each name, oldest first
((${#files[@]})) || exit 0
mapfile -t names < <(printf '%s\n' "${!count[@]}" | sort)
for name in "${names[@]}"; do
    spare=$((${count[$name]} - keep))
    for file in "${files[@]}"; do
        if [ "${file%-*}" = "$name" ] && ((spare-- > 0)); then
            rm -- "./$file" && printf 'deleted %s\n' "$file"
        fi
    done
done
