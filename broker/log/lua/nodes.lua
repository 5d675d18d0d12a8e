-- Nodes: the node that holds a conversation's workspace.
-- Keys:  shard base  :nodes  zset  node -> when it counts as lost      conversation base  :meta  node, moves, is_movable

local store = require('store/prelude')
local nodes = {}

nodes.NODE_PATIENCE_MS = 120000

-- Whether a node had no heartbeat for so long that its workspaces move elsewhere. A node that was never seen gets the same
-- time as others.
function nodes.is_lost(shard, node)
  local now, deadline = store.now_ms(shard), redis.call('ZSCORE', shard .. ':nodes', node)
  if deadline then return tonumber(deadline) < now end
  redis.call('ZADD', shard .. ':nodes', now + nodes.NODE_PATIENCE_MS, node)
  return false
end

-- Unbind a conversation from its node. A directory that a user provided exists only on its node and cannot move.
function nodes.unbind(meta)
  if store.get(meta, 'is_movable') ~= '1' then return false end
  redis.call('HDEL', meta, 'node')
  redis.call('HINCRBY', meta, 'moves', 1)
  return true
end

-- bind_node: bind a workspace to a node if it has none. Writes nothing if the conversation is gone.
-- ARGV  node.  returns {'bound', its current node} {'missing'}
local function bind_node(keys, args)
  local meta = keys[1] .. ':meta'
  if not store.get(meta, 'last_id') then return {'missing'} end
  redis.call('HSETNX', meta, 'node', args[1])
  return {'bound', store.get(meta, 'node')}
end

redis.register_function('deck_bind_node', bind_node)

return nodes
