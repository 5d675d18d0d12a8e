#!/usr/bin/env bash
# Keep the newest backups of a folder.

folder=$1
keep=$2

cd $folder
for file in $(ls -t *.tar.gz | tail -n +$((keep + 1))); do
    rm -rf $file
    echo deleted $file
done
