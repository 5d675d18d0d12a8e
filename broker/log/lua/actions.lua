-- Actions: their way from the log to a tool worker, which claims them before the side effect.
-- Keys:  shard base  :act:<route> :act:interactive:<route>  streams  route: 'pool:<name>' or 'node:<name>'
--        conversation base  :once  hash  q:<action> -> '<stream>|<entry>' that carries it   w:<action> -> its claimer
--                                  (or '-': its result was refused)
--                                  n:<action> -> attempts   m:<action> -> it acts now   o:<action> -> ids that settled it
--                                  f:<action> -> deaths while it acted after a wait for others
--                                  k:<action> -> its checksum   b:<action> -> its bytes while it waits in a line
--                                  g:<action> d:<action> -> its capability, and its workspace, while it waits in a line

local groups = require('log/lua/groups')
local history = require('log/lua/history')
local nodes = require('log/lua/nodes')
local ownership = require('log/lua/ownership')
local results = require('log/lua/results')
local secrets = require('log/lua/secrets')
local store = require('store/prelude')
local turns = require('log/lua/turns')
local actions = {}

local NODES_LOOKED_AT = 16       -- by each action that joins the line of a pool
local MOST_COUNTED = 1000        -- deaths with an action
local WAITING_FOR_POOL = turns.WAITING .. ' p'

local function add_action(stream, once, cid, action, bytes, workspace, is_for_pool, capability)
  local fields = {'c', cid, 'a', action, 'e', bytes, 'w', workspace}
  if capability then
    fields[#fields + 1] = 'k'
    fields[#fields + 1] = capability
  end
  if is_for_pool then
    fields[#fields + 1] = 'p'
    fields[#fields + 1] = '1'
  end
  redis.call('HSET', once, 'q:' .. action, stream .. '|' .. redis.call('XADD', stream, '*', unpack(fields)))
end

-- Put an action into its stream when its turn has come, unless it was settled or sent elsewhere meanwhile.
function actions.hand_over_action(shard, stream, member)
  local cid, action = string.match(member, '^(.*) (%d+)$')
  if not cid then return false end
  local base = shard .. ':c:' .. cid
  local once, place = base .. ':once', store.get(base .. ':once', 'q:' .. action)
  if place ~= stream .. '|' .. turns.WAITING and place ~= stream .. '|' .. WAITING_FOR_POOL then return false end
  -- An earlier version has not noted the bytes. If they are nowhere, the log has lost it.
  local bytes = store.get(once, 'b:' .. action) or history.bytes_of(base, action)
  local capability, sealed = unpack(redis.call('HMGET', once, 'g:' .. action, 'd:' .. action))
  redis.call('HDEL', once, bytes and 'b:' .. action or 'q:' .. action, 'g:' .. action, 'd:' .. action)
  if not bytes then return false end
  local workspace = sealed or store.get(base .. ':meta', 'workspace') or ''
  add_action(stream, once, cid, action, bytes, workspace, place == stream .. '|' .. WAITING_FOR_POOL, capability)
  return true
end

-- The action streams that a worker registered. A forged hash must not make other keys be maintained as action streams.
function actions.streams_of(shard, worker)
  local found, root = {}, shard .. ':act:'
  for stream in string.gmatch(store.get(shard .. ':worker:' .. worker .. ':about', 'streams') or '', '%S+') do
    if string.sub(stream, 1, #root) == root then found[#found + 1] = stream end
  end
  return found
end

-- The line of a node that corresponds to a pool's stream; nil for any other stream.
local function line_beside(shard, stream, node)
  local name = string.sub(stream, #shard + 1)
  local lane = string.match(name, '^(:act:)pool:') or string.match(name, '^(:act:interactive:)pool:')
  return lane and node and shard .. ':turns' .. lane .. 'node:' .. node
end

-- Whether every live node has its own line, so that no node needs the new entries of a pool's line.
local function all_nodes_have_lines(shard, stream)
  local present = redis.call('ZRANGEBYSCORE', shard .. ':nodes', store.now_ms(shard), '+inf', 'LIMIT', 0, NODES_LOOKED_AT)
  for _, node in ipairs(present) do
    local line = line_beside(shard, stream, node)
    if not line or not turns.has_waiting(line) then return false end
  end
  return #present > 0 and #present < NODES_LOOKED_AT
end

-- Fill the window of an action stream. From a pool's line, a node takes only what would be next in its own line.
function actions.pump_actions(shard, stream, node)
  if not turns.has_waiting(turns.line_of(shard, stream)) then return end
  local line, may_go = line_beside(shard, stream, node), nil
  if line and turns.has_waiting(line) then
    may_go = function(class, member)
      local cid = string.match(member, '^(.*) %d+$')
      local tenant = cid and redis.pcall('HGET', shard .. ':c:' .. cid .. ':meta', 'tenant')
      return turns.goes_before(shard, line, class, type(tenant) == 'string' and tenant or '')
    end
  end
  turns.pump(shard, stream, groups.TOOLS, actions.hand_over_action, may_go)
end

-- Put an action on the action stream of its conversation's node, or of its pool while it has no node. If `wanted` is
-- 'pool:<name>', it goes to that pool wherever the workspace is, and the entry says so ('p'). The stream of interactive
-- actions exists once a worker that reads it has registered.
-- Its entry carries its capability, if it has one.
-- from: the random text for its capability as `seed`; or `k` and `w` of its earlier entry, which may be forged, so no seed
function actions.enqueue(shard, base, cid, action, bytes, wanted, from)
  local meta, once = base .. ':meta', base .. ':once'
  local found = redis.call('HMGET', meta, 'node', 'pool', 'workspace', 'class', 'tenant')
  local node, pool, noted, class, tenant = unpack(found)
  local workspace = from['w'] or noted or ''
  local capability = from['k'] or results.grant(base, cid, action, from['seed'], bytes, wanted, workspace)
  local route = wanted
  if not route then
    local is_bound = node and not (nodes.is_lost(shard, node) and nodes.unbind(meta))
    route = is_bound and 'node:' .. node or 'pool:' .. (pool or 'bash')
  end
  local stream = shard .. ':act:' .. route
  if class == '0' then
    local first = shard .. ':act:interactive:' .. route
    if redis.call('EXISTS', first) == 1 then stream = first end
  end
  redis.call('HSETNX', once, 'k:' .. action, history.checksum_in(bytes))
  if turns.line_up(shard, stream, groups.TOOLS, cid .. ' ' .. action, class, tenant) then
    local place = stream .. '|' .. (wanted and WAITING_FOR_POOL or turns.WAITING)
    redis.call('HSET', once, 'q:' .. action, place, 'b:' .. action, bytes)
    if capability then redis.call('HSET', once, 'g:' .. action, capability, 'd:' .. action, workspace) end
    if not all_nodes_have_lines(shard, stream) then actions.pump_actions(shard, stream) end
  else
    add_action(stream, once, cid, action, bytes, workspace, wanted, capability)
  end
end

-- Acknowledge an action's entry, given as '<stream>|<entry>'. An action in a line has no entry.
function actions.acknowledge(place)
  local stream, entry = string.match(place, '^(.*)|(.*)$')
  if stream and groups.id_parts(entry) then redis.call('XACK', stream, groups.TOOLS, entry) end
end

-- dispatch: make sure that an appended action reaches a tool worker. Idempotent.
-- ARGV  cid, worker, token, action id, bytes, 'pool:<name>' or '', random text for its capability
-- returns  {'queued'} {'running', worker} {'settled'} {'enqueued'} {'fenced'} {'results'}: settle those that wait first
local function dispatch(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, once, cid, action = base .. ':meta', base .. ':once', args[1], args[4]
  if not ownership.is_owner(meta, args[2], args[3]) then return {'fenced'} end
  if results.are_waiting(base) then return {'results'} end
  if store.get(once, 'o:' .. action) then return {'settled'} end
  local claimer = store.get(once, 'w:' .. action)
  local queued = store.get(once, 'q:' .. action)
  if queued then
    local stream, entry = string.match(queued, '^(.*)|(.*)$')
    local is_waiting = entry == turns.WAITING or entry == WAITING_FOR_POOL
    if is_waiting and turns.is_in_line(shard, stream, cid .. ' ' .. action) then return {'queued'} end
    local where = stream and groups.delivery_state(shard, stream, groups.TOOLS, entry)
    if where == 'queued' then return {'queued'} end
    if where == 'delivered' then return {'running', claimer or ''} end
  end
  if claimer and store.alive(shard, claimer) then
    if results.is_granted(base, action) then return {'running', claimer} end
    redis.call('HSET', once, 'w:' .. action, results.REFUSED)  -- whatever it leaves has no capability
  end
  local route = args[6] ~= '' and args[6] or nil
  actions.enqueue(shard, base, cid, action, args[5], route, {seed = args[7]})
  return {'enqueued'}
end

-- A count of `once`. Tool workers write these, so that one that was taken over may have: what cannot be a count is none, and
-- what is too large for one has no further effect.
local function count_of(once, field)
  local count = store.number_of(store.get(once, field))
  return count and math.floor(math.max(0, math.min(count, MOST_COUNTED))) or 0
end

local function count_up(once, field)
  local count = count_of(once, field) + 1
  redis.call('HSET', once, field, count)
  return count
end

-- claim_action: claim an action before its side effect. From then on, the entry it is claimed with (q:<action>) carries
-- it; copies of it are dropped.
-- ARGV  cid, action id, worker, node, stream, entry,
--       '1' if any node may run it; then the claim does not bind the workspace to the node,
--       checksum of the action, see remembers_action: no action may be run in place of one that the log has lost,
--       '1' to end the reply with the secrets, see secrets.read; the seal of what the worker has in hand, see results.grant
-- returns  {'claimed', attempt, moves}                     run it
--          {'reclaimed', attempt, previous worker, moves}  ask the journal first
--          moves: how often the workspace was moved away from a lost node
--          both end with the conversation's demand, see store.with_acks
--          (previous worker '-': its result was refused)
--          (a worker that repeats its claim, because a reply or its entry came twice, is its own previous worker)
--          {'settled'} {'busy', worker} {'forwarded', node} {'missing'} {'closed'}   acknowledged; nothing to do
--          {'forged'}       acknowledged and recorded: no owner has dispatched what the worker has in hand
--          {'lost', last}   acknowledged: the log does not hold the action
--          {'swept'}   nothing was changed: the entry has been handed to others
local function claim_action(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, once = base .. ':meta', base .. ':once'
  local cid, action, worker, node, stream, entry, anywhere, checksum, wants_secrets, seal = unpack(args)
  if not store.alive(shard, worker) then return {'swept'} end
  -- This entry left the stream: the next one comes from the node's line, or from a pool's.
  actions.pump_actions(shard, stream, node)
  for _, other in ipairs(actions.streams_of(shard, worker)) do
    if other ~= stream then actions.pump_actions(shard, other, node) end
  end
  local place, before = stream .. '|' .. entry, store.get(once, 'w:' .. action)
  local idle, last = nil, store.get(meta, 'last_id')
  if not last then idle = {'missing'}
  elseif not history.remembers_action(base, action, checksum) then idle = {'lost', tonumber(last)}
  elseif store.get(once, 'o:' .. action) then idle = {'settled'}
  elseif store.get(meta, 'closed') then idle = {'closed'}
  elseif before and before ~= worker and store.alive(shard, before) then idle = {'busy', before}
  elseif not results.may_run(base, action, seal) then
    store.note_unreadable(shard, stream, entry, 'an action that was not dispatched like this', cid .. ' ' .. action)
    idle = {'forged'}
  end
  if idle then
    actions.acknowledge(place)
    return idle
  end
  local hidden, bound = wants_secrets == '1' and secrets.read(base) or nil, store.get(meta, 'node')
  local is_elsewhere = bound and bound ~= node and anywhere ~= '1'
  if is_elsewhere and nodes.is_lost(shard, bound) and nodes.unbind(meta) then bound = nil
  elseif is_elsewhere then
    local found = redis.call('XRANGE', stream, entry, entry)
    if #found == 1 then
      local about = store.pairs_of(found[1][2])
      actions.enqueue(shard, base, cid, action, about['e'], nil, {k = about['k'], w = about['w']})
    end
    actions.acknowledge(place)
    return {'forwarded', bound}
  end
  local copy = store.get(once, 'q:' .. action)
  if before == worker and copy and copy ~= place then actions.acknowledge(copy) end
  if not bound and anywhere ~= '1' then redis.call('HSET', meta, 'node', node) end
  redis.call('HSET', once, 'w:' .. action, worker, 'q:' .. action, place)
  local about = redis.call('HMGET', meta, 'moves', 'acks')
  local moves, acks = tonumber(about[1] or '') or 0, about[2]
  if before == worker or before == results.REFUSED then
    local attempts = math.max(1, count_of(once, 'n:' .. action))
    return store.with_acks({'reclaimed', attempts, before, moves, hidden}, acks)
  end
  if not before then
    return store.with_acks({'claimed', count_up(once, 'n:' .. action), moves, hidden}, acks)
  end
  -- The first worker that dies with an action counts against it; after that, only one that died while it acted.
  local attempts = count_of(once, 'n:' .. action)
  if attempts < 2 or store.get(once, 'm:' .. action) then attempts = count_up(once, 'n:' .. action) end
  if store.get(once, 'm:' .. action) == '3' then count_up(once, 'f:' .. action) end
  redis.call('HDEL', once, 'm:' .. action)
  redis.call('XADD', shard .. ':takeovers', 'MAXLEN', '~', 10000, '*', 'c', cid, 'a', action, 'from', before,
    'to', worker, 'at', store.now_ms(shard))
  return store.with_acks({'reclaimed', attempts, before, moves, hidden}, acks)
end

-- mark_action: record that an action that workers have died with acts ('1'), or only waits ('0'). If its worker dies while
-- it acts, the death counts against it. '2': it waits for others, and has done all that it does before; of the deaths while
-- it acted, only those count that came after such a wait ('3').
-- ARGV  action id, worker, '0' to '3'.  returns {'marked'} {'lost'}
local function mark_action(keys, args)
  local once, action = keys[1] .. ':once', args[1]
  if store.get(once, 'w:' .. action) ~= args[2] then return {'lost'} end
  if args[3] == '1' or args[3] == '3' then redis.call('HSET', once, 'm:' .. action, args[3])
  else redis.call('HDEL', once, 'm:' .. action) end
  if args[3] == '2' then
    local after, attempts = count_of(once, 'f:' .. action), count_of(once, 'n:' .. action)
    if attempts > 2 + after then redis.call('HSET', once, 'n:' .. action, string.format('%.0f', 2 + after)) end
  end
  return {'marked'}
end

redis.register_function('deck_dispatch', dispatch)
redis.register_function('deck_claim_action', claim_action)
redis.register_function('deck_mark_action', mark_action)

return actions
