-- Lost nodes: move waiting entries from lost nodes to the pools of their conversations.
-- Keys:  shard base  :nodes  zset   :clock  hash  nodes_left -> number of lost nodes checked so far   :act:node:<node>

local actions = require('log/lua/actions')
local nodes = require('log/lua/nodes')
local store = require('store/prelude')
local turns = require('log/lua/turns')
local lost_nodes = {}

local NODES_AT_ONCE, LEFT_AT_ONCE = 64, 1000  -- lost nodes per beat, and entries per node

-- Send an entry elsewhere. Returns whether it stays: it is an order, or an action in a directory that only this node has.
local function leave_with(shard, node, stream, entry, about)
  local base = shard .. ':c:' .. about['c']
  local meta, once, place = base .. ':meta', base .. ':once', stream .. '|' .. entry
  if about['x'] then return true end
  if not about['e'] or store.get(once, 'q:' .. about['a']) ~= place then return false end
  if store.get(meta, 'node') == node and not nodes.unbind(meta) then return true end
  actions.enqueue(shard, base, about['c'], about['a'], about['e'], nil, {k = about['k'], w = about['w']})
  actions.acknowledge(place)
  return false
end

-- Send the waiting entries of a lost node to the pools of their conversations. Remove the sent entries, which would block
-- later ones; also remove orders that have piled up, and an empty stream.
local function leave_node(shard, node)
  for _, lane in ipairs({':act:interactive:node:', ':act:node:'}) do
    local stream = shard .. lane .. node
    turns.end_line(shard, stream, actions.hand_over_action)  -- which is emptied below
    if store.is_there(shard, stream, 'stream') then
      local found = redis.call('XRANGE', stream, '-', '+', 'COUNT', LEFT_AT_ONCE)
      for _, item in ipairs(found) do
        local about = store.pairs_of(item[2])
        local stays = store.attempt(shard, stream, item[1], leave_with, shard, node, stream, item[1], about)
        if not stays or (about['x'] and #found == LEFT_AT_ONCE) then redis.call('XDEL', stream, item[1]) end
      end
      if redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
    end
  end
end

-- Extend the deadline of a tool worker's node at its beat, and empty the streams of lost nodes.
function lost_nodes.maintain_nodes(shard, about, now)
  local node = store.get(about, 'node')
  if not node then return end
  local patience = store.number_of(store.get(about, 'node_patience_ms')) or nodes.NODE_PATIENCE_MS
  redis.call('ZADD', shard .. ':nodes', now + patience, node)
  -- Many nodes may never come back: each beat checks the next of them.
  local clock = shard .. ':clock'
  local kept = store.get(clock, 'nodes_left')
  local from = math.max(0, store.number_of(kept) or 0)
  local lost = redis.call('ZRANGEBYSCORE', shard .. ':nodes', '-inf', now - 1, 'LIMIT', math.floor(from), NODES_AT_ONCE)
  for _, other in ipairs(lost) do store.attempt(shard, shard .. ':nodes', other, leave_node, shard, other) end
  if #lost == NODES_AT_ONCE then redis.call('HSET', clock, 'nodes_left', from + NODES_AT_ONCE)
  elseif kept then redis.call('HDEL', clock, 'nodes_left') end
end

return lost_nodes
