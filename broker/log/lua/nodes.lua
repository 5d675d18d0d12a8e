-- Nodes: where the workspace of a conversation is.
-- Keys:  shard base  :nodes  zset  node -> when it counts as lost      conversation base  :meta  node, moves, is_movable

local store = require('store/prelude')
local nodes = {}

nodes.NODE_PATIENCE_MS = 120000

-- Whether no tool worker of a node has sent a heartbeat for so long that its workspaces continue elsewhere. A node that
-- was never seen gets the time that others have.
function nodes.is_lost(shard, node)
  local now, deadline = store.now_ms(shard), redis.call('ZSCORE', shard .. ':nodes', node)
  if deadline then return tonumber(deadline) < now end
  redis.call('ZADD', shard .. ':nodes', now + nodes.NODE_PATIENCE_MS, node)
  return false
end

-- Take a conversation off its node; a directory that somebody gave us is where it is, and nowhere else.
function nodes.unbind(meta)
  if store.get(meta, 'is_movable') ~= '1' then return false end
  redis.call('HDEL', meta, 'node')
  redis.call('HINCRBY', meta, 'moves', 1)
  return true
end

-- bind_node: put a workspace that has no node on one; where the conversation is gone, nothing is written.
-- ARGV  node.  returns {'bound', the node that it has} {'missing'}
local function bind_node(keys, args)
  local meta = keys[1] .. ':meta'
  if not store.get(meta, 'last_id') then return {'missing'} end
  redis.call('HSETNX', meta, 'node', args[1])
  return {'bound', store.get(meta, 'node')}
end

redis.register_function('deck_bind_node', bind_node)

return nodes
