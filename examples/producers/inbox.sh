#!/bin/sh
# One task through the stream contract, with redis-cli: inbox.sh "List the files"
# REDIS_CLI holds the command with its options, such as: redis-cli -u redis://127.0.0.1:6379/0
# docs/producing-work.md describes the contract.
set -eu
cli=${REDIS_CLI:-redis-cli}
id=$(cat /proc/sys/kernel/random/uuid)
task=$(printf %s "$1" | sed 's/[\\"]/\\&/g')
model=${MODEL:+\"model\": \"$MODEL\",}

# The same id sent again is the same task.
$cli XADD deck:inbox '*' v 1 reply_to "example-$id" request "{\"id\": \"$id\", $model \"task\": \"$task\"}" > /dev/null
for event in accepted settled; do
  while ! reply=$($cli XREVRANGE "deck:replies:example-$id" + - | grep -A 1 -x event | grep -x -e "$event" -e rejected); do
    sleep 0.2
  done
  echo "$reply"
  [ "$reply" != rejected ] || exit 1
done
