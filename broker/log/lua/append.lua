-- Append: the only function that writes to a log.
-- Keys:  conversation base  :events  stream   :meta  hash  the fields of `ls`, and those of owners and waits
--                           :once    hash  'create:<key>', 'p:<key>', 'o:<action>' -> '<first>:<last>' of an append
--        shard base         :index   zset  conversation -> created (ms)   :awaited :expiring :parked :dead  zsets
--                           :ended   stream   c=conversation: its state is a settled one since this entry; a hint for
--                                    clients that wait, of about the latest MOST_ENDED
--                           :notices stream   and those of wakeups, actions, admission, labels and webhooks
-- Holds: a repeated append is written once; an append by a former owner is refused by its token.

local actions = require('log/lua/actions')
local admission = require('log/lua/admission')
local callers = require('log/lua/callers')
local conversations = require('log/lua/conversations')
local history = require('log/lua/history')
local labels = require('log/lua/labels')
local marks = require('log/lua/marks')
local results = require('log/lua/results')
local secrets = require('log/lua/secrets')
local shards = require('log/lua/shards')
local store = require('store/prelude')
local tenants = require('log/lua/tenants')
local wakeups = require('log/lua/wakeups')
local webhooks = require('log/lua/webhooks')

local MOST_CARRIED_BYTES = 16384  -- of an observation that the owner gets with its notification

local MOST_ENDED = 1000

local STOPPED = '^party_stopped:(%d+)$'  -- the key of the news that a stopped action has ended

-- Fields that are set at creation only: no later append changes the tenant of a conversation, or its key.
local FIXED = {class = true, tenant = true, open_in = true, acks = true, data_key = true}

-- The value of a field of the call's `fields`, {name, value, …}.
local function given(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then return fields[at + 1] end
  end
  return nil
end

-- Record when a new conversation may start: start.delay_ms from now, start.limit_ms until it expires; either may be nil.
-- Returns whether it has to wait.
local function plan_start(shard, meta, cid, now, wall, start)
  local delay, limit = start.delay_ms, start.limit_ms
  redis.call('HSET', meta, 'planned', 'waiting')
  if limit then
    redis.call('HSET', meta, 'expires_ms', now + limit)
    redis.call('ZADD', shard .. ':expiring', now + limit, cid)
  end
  if not delay then return false end
  redis.call('HSET', meta, 'due_ms', now + delay, 'not_before_ms', wall + delay, 'wait_reason', 'scheduled')
  redis.call('ZADD', shard .. ':parked', now + delay, cid)
  return true
end

local NO_FIELDS = {}

-- The fields read from the conversation, in one command: a call into the server costs more than all other work here.
local READ = {'last_id', 'closed', 'node', 'owner', 'token', 'rung', 'append_key', 'append_ids', 'awaited', 'noticed',
  'open_in', 'created_ms', 'double_texting', 'busy', 'planned', 'tenant', 'acks', 'data_key', 'last_sum'}
local CLOSED, NODE, OWNER, TOKEN, RUNG, APPEND_KEY, APPEND_IDS, AWAITED, NOTICED, OPEN_IN, CREATED, DOUBLE_TEXTING, BUSY,
  PLANNED, TENANT, ACKS, DATA_KEY, LAST_SUM = 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19

-- The context of one append: keys, call, times, and the conversation's fields by their positions in READ. Its steps add
-- `key`, which identifies a repetition, `whole` (see admission.decide) and `first`, and change `last`, `open_in` and
-- `must_wait`. More fields would need a larger table for every append.
local function start(keys, args, call)
  local base, shard = keys[1], keys[2]
  call = call or cmsgpack.unpack(args[2])
  local meta = base .. ':meta'
  local now, wall, hooked = store.times_ms(shard)
  local found = redis.call('HMGET', meta, unpack(READ))
  call.condition, call.fields = call.condition or '', call.fields or NO_FIELDS
  return {base = base, shard = shard, meta = meta, once = base .. ':once', cid = args[1], args = args, call = call,
    now = now, wall = wall, hooked = hooked, found = found, last = tonumber(found[1] or ''), key = nil, first = nil,
    open_in = found[OPEN_IN], must_wait = call.quiet}
end

-- Acknowledge the entry of the action that a tool worker answers.
local function acknowledge(a)
  if a.call.place then actions.acknowledge(a.call.place) end
end

-- Whether a producer's append is refused: the conversation works and rejects messages meanwhile, or an expiry comes too
-- late.
local function is_refused(a)
  if a.call.condition == 'expire' then return a.found[PLANNED] ~= 'waiting' end
  local policy = string.match(a.call.condition, '^message:(.*)$')
  if not policy then return false end
  return (policy ~= '' and policy or a.found[DOUBLE_TEXTING]) == 'reject' and a.found[BUSY] == '1'
end

-- Whether an event is not encrypted as its conversation is: with its key, or not at all. Its first byte says so, and the
-- id of the key behind the head of six bytes.
local function has_another_key(a)
  local key = a.found[DATA_KEY]
  if a.call.by == 'create' then key = given(a.call.fields, 'data_key') end
  for at = 1, #a.call.events do
    local bytes = a.args[at + 2]
    local is_encrypted = string.byte(bytes) == 255
    if is_encrypted ~= (key and true or false) then return true end
    if key and string.sub(bytes, 7, 6 + #key) ~= key then return true end
  end
  return false
end

-- Checks by kind of writer. Each returns the reply if nothing must be written, and otherwise nil.
local check = {}

function check.create(a)
  a.key = 'create:' .. a.call.key
  if a.last then
    local range = store.get(a.once, a.key)
    return range and history.duplicate(range) or {'exists'}
  end
  if shards.is_outdated(a.shard, a.call.shards) then return {'raised'} end
  local tenant, refusal = given(a.call.fields, 'tenant') or '', nil
  local pools = tenants.refused_pool(a.shard, tenant, a.call.pool)
  if pools then return {'pool', a.call.pool, tenant, pools} end
  if not a.call.inner then
    refusal, a.open_in, a.whole = admission.decide(a.shard, tenant, a.call.elsewhere, a.now)
  end
  return refusal or a.found[CLOSED] and {'closed'}
end

function check.owner(a)
  local call = a.call
  if not a.last then return {'missing'} end
  if a.found[OWNER] ~= call.worker or a.found[TOKEN] ~= call.token then return {'fenced'} end
  a.key = call.token .. ':' .. call.seen .. ':' .. call.key .. call.checksum
  if a.found[APPEND_KEY] == a.key then return history.duplicate(a.found[APPEND_IDS]) end
  if results.are_waiting(a.base) then return {'conflict', a.last} end  -- the caller settles them, and decides again
  if not history.remembers(a.base, call.seen, call.checksum) then return {'lost', a.last} end
  if tonumber(call.seen) ~= a.last then return {'conflict', a.last} end
  return a.found[CLOSED] and {'closed'}
end

function check.tool(a)
  local reply
  if not a.last then return {'missing'} end
  if not history.remembers_action(a.base, a.call.action, a.call.checksum) then
    reply = {'lost', a.last}
  else
    local range = store.get(a.once, 'o:' .. a.call.action)
    reply = range and history.duplicate(range) or a.found[CLOSED] and {'closed'}
  end
  if reply then acknowledge(a) end
  return reply
end

function check.producer(a)
  if not a.last then return {'missing'} end
  a.key = 'p:' .. a.call.key
  local range = store.get(a.once, a.key)
  if range then return history.duplicate(range) end
  local stopped = string.match(a.call.key, STOPPED)
  if a.found[CLOSED] or stopped and not results.was_stopped(a.base, stopped) then return {'closed'} end
  if is_refused(a) then return {'busy'} end
  if a.call.action and not history.remembers_action(a.base, a.call.action, a.call.checksum) then
    return {'lost', a.last}
  end
  return a.call.seen and tonumber(a.call.seen) ~= a.last and {'conflict', a.last}
end

local function create(a)
  local call, meta, shard, cid, wall = a.call, a.meta, a.shard, a.cid, a.wall
  if not call.inner then
    a.found[CREATED] = wall
    redis.call('HSET', meta, 'open_in', a.open_in)
    admission.count_open(shard, a.open_in, cid, given(a.call.fields, 'state'), wall)
    if a.whole then redis.call('HSET', shard .. ':paces', a.open_in, string.format('%.0f', a.whole)) end
  end
  a.last = 0
  redis.call('HSET', meta, 'created_ms', wall, 'pool', call.pool)
  redis.call('ZADD', shard .. ':index', wall, cid)
  if call.caller then callers.add(a.base, shard, call.caller) end
  if call.awaited then
    redis.call('HSET', meta, 'awaited', call.awaited)
    redis.call('ZADD', shard .. ':awaited', a.now + conversations.FIRST_LOOK_MS, cid)
  end
  a.must_wait = call.start and plan_start(shard, meta, cid, a.now, wall, call.start)
end

-- The fields to write, and whether they contain labels. Updates the count of open conversations.
local function fields_of(a)
  local fields, is_created, relabels, update = a.call.fields, a.call.by == 'create', false, {'updated_ms', a.wall}
  -- Until its owner changes it. A message to a conversation that has not started belongs to its task.
  if a.call.by == 'producer' and a.found[PLANNED] ~= 'waiting' and string.find(a.call.condition, '^message:') then
    update[3], update[4] = 'busy', '1'
  end
  local n = #update
  for at = 1, #fields, 2 do
    local name, value = fields[at], fields[at + 1]
    if is_created or not FIXED[name] then
      update[n + 1], update[n + 2], n = name, value, n + 2
      relabels = relabels or name == 'label_index'
    end
    if name == 'state' and not is_created and a.open_in then
      admission.count_open(a.shard, a.open_in, a.cid, value, a.found[CREATED] or a.wall)
    end
  end
  return update, relabels
end

local function cancel_actions(a)
  if not (a.found[NODE] and a.call.cancels) then return end
  for _, action in ipairs(a.call.cancels) do
    local order = action == '0' and 'close' or 'cancel'
    -- A tool worker may not read the log, and has to know what it drops. This append may bring the action.
    local found = redis.call('XRANGE', a.base .. ':events', action .. '-0', action .. '-0')[1]
    local entry = found and found[2][2] or order == 'cancel' and a.args[action - a.last + 2] or ''
    redis.call('XADD', a.shard .. ':act:node:' .. a.found[NODE], '*', 'c', a.cid, 'a', action, 'x', order, 'e', entry)
  end
end

-- What is kept of a settled action: the ids of its observation, its checksum, and the fingerprint of the tool worker.
local function settled_by(a, once, action, id)
  local checksum = store.get(once, 'k:' .. action)
  local fingerprint = a.call.by == 'tool' and a.call.fingerprint or ''
  return table.concat({id, id, checksum, checksum and fingerprint ~= '' and fingerprint or nil}, ':')
end

local function write_events(a)
  local events, once, last = a.base .. ':events', a.once, a.last
  a.first = last + 1
  for at, event in ipairs(a.call.events) do
    local bytes, dispatch, answers = a.args[at + 2], event.dispatch, event.answers
    last = last + 1
    redis.call('XADD', events, last .. '-0', 'e', bytes)
    if dispatch then
      local route = dispatch ~= '1' and dispatch or nil
      actions.enqueue(a.shard, a.base, a.cid, last, bytes, route, {seed = a.call.seed})
    end
    if answers then
      redis.call('HSET', once, 'o:' .. answers, settled_by(a, once, answers, last))
      redis.call('HDEL', once, 'q:' .. answers, 'w:' .. answers, 'n:' .. answers, 'm:' .. answers, 'k:' .. answers,
        'b:' .. answers, 'f:' .. answers, 'g:' .. answers, 'd:' .. answers)
      if a.call.by == 'tool' then results.forget_grant(a.base, answers) else results.stop_grant(a.base, answers) end
    end
  end
  a.last = last
end

-- Write the fields, including those that identify a repetition of this append. A tool's append is identified by the action
-- that it answers.
local function write_fields(a, update, relabels)
  local by, ids, n = a.call.by, a.first .. ':' .. a.last, #update
  update[n + 1], update[n + 2] = 'last_id', a.last
  if a.last >= a.first then
    update[n + 3], update[n + 4], n = 'last_sum', history.checksum_in(a.args[#a.args]), n + 2
  end
  -- Unless a tool worker says that its action has not used the workspace, it may have.
  if by == 'tool' and a.call.uses ~= false then update[n + 3], update[n + 4], n = 'used', '1', n + 2 end
  if by == 'owner' then
    -- An append without events leaves the last id unchanged, so it must not be taken for the append that changed it.
    if a.last >= a.first then
      update[n + 3], update[n + 4], update[n + 5], update[n + 6] = 'append_key', a.key, 'append_ids', ids
    end
  elseif by ~= 'tool' then
    redis.call('HSET', a.once, a.key, ids)
    redis.call('ZREM', a.shard .. ':dead', a.cid)
  end
  if relabels and by ~= 'create' then labels.leave(a.shard, a.meta, a.cid) end
  redis.call('HSET', a.meta, unpack(update))
  if relabels or by == 'create' then labels.enter(a.shard, a.meta, a.cid, a.found[CREATED] or a.wall) end
  if by == 'owner' then marks.clear(a.base) end
end

-- Queue notices for ingress workers, waiting clients and webhooks, and remove an expired conversation from its timers.
local function leave_word(a)
  if a.found[AWAITED] and (a.call.by == 'owner' or a.call.condition == 'expire') then
    local ends = a.call.condition == 'expire' or admission.is_settled(given(a.call.fields, 'state'))
    callers.send_notice(a.shard, a.meta, a.cid, a.found[NOTICED], ends)
  end
  -- A waiting client also polls, so a user without the right to write here leaves the hint out.
  if a.call.by ~= 'create' and admission.is_settled(given(a.call.fields, 'state')) then
    redis.pcall('XADD', a.shard .. ':ended', 'MAXLEN', '~', MOST_ENDED, '*', 'c', a.cid)
  end
  if a.hooked and a.last >= a.first then
    local tenant = a.call.by == 'create' and given(a.call.fields, 'tenant') or a.found[TENANT]
    webhooks.add_news(a.shard, a.cid, tenant, a.first)
  end
  if a.call.condition == 'expire' then
    redis.call('ZREM', a.shard .. ':expiring', a.cid)
    redis.call('ZREM', a.shard .. ':parked', a.cid)
  end
end

-- Notify the owner or the ready stream, unless the owner itself appends.
local function notify(a)
  if a.call.by == 'owner' then return end
  local call, bytes = a.call, a.args[3]
  acknowledge(a)
  local is_alone = a.first == a.last and #bytes <= MOST_CARRIED_BYTES
  if call.by == 'tool' and a.found[OWNER] and not a.found[RUNG] and is_alone then
    local is_behind_action = tostring(a.last - 1) == call.action and call.checksum ~= ''
    local before = is_behind_action and call.checksum or a.found[LAST_SUM]
    wakeups.hand_to_owner(a.shard, a.base, a.found[OWNER], a.cid, a.last, bytes, before or '')
  elseif not a.must_wait and call.condition ~= 'expire' then
    wakeups.notify_unless(a.found[RUNG], a.found[OWNER], a.shard, a.meta, a.cid, a.now)
  end
end

-- append: the only function that writes to a log.
-- KEYS  conversation base, shard base
-- ARGV  cid, the arguments below in a map of MessagePack, the bytes of each event …
--   by 'create'    key, pool   the conversation must not exist
--                  awaited: the caller to notify of its end, 'celery' or 'stream:<name>'; or nil
--                  caller: the fields of this caller, {name, value, …}, see callers.add; or nil
--                  inner: it is part of another one's step, and neither refused nor counted; or else
--                  elsewhere: number of the tenant's open conversations in other shards, see admission.lua
--                  shards: number of the store's shards that the caller knows, see shards.lua; none for 1
--                  start: when it may start, see plan_start, or nil
--   by 'producer'  key
--                  quiet: send no notification
--                  condition 'message:<policy>': a user's message, refused while the agent works if the policy, by
--                  default the conversation's, is 'reject'; 'expire': refused unless the conversation is scheduled
--                  seen: required id of the last event, or nil
--                  capability: of the action whose end this is, see results.leave_stop; or nil
--                  action, checksum: refused unless the log has this action, see history.remembers_action; or nil
--   by 'tool'      worker, action, checksum of the action, see history.remembers_action
--                  fingerprint: of the action, for workspace hosts; or nil
--                  uses: whether the action has used the workspace; nil: it may have
--                  place: '<stream>|<entry>' to acknowledge, or nil
--   by 'owner'     worker, token
--                  seen, checksum: of the last event that the decision is based on
--                  key: identifies this call; a repetition has the same key
--   events   for each one: dispatch '1': a runnable action for its action stream; 'pool:<name>': for that pool's
--            answers: the action that an observation settles
--   fields   the fields of `ls`: {name, value, …}; or nil
--   cancels  running actions to stop; '0': all programs of the workspace; or nil
--   seed     random text, from which the capabilities of dispatched actions are made; or nil
--   secrets  number of secret values that the writer masks; nil: it has looked them up
--   sample   one of these values, encrypted
-- An owner's append to an awaited conversation adds a notice for ingress workers, see callers.send_notice.
-- returns  {'appended', first, last} {'duplicate', first, last} {'fenced'} {'conflict', last} {'closed'} {'missing'}
--          {'exists'} {'busy'} {'lost', last}: the log does not hold the event that the writer remembers
--          {'locked'}: an event is not encrypted as its conversation is; nothing was written
--          {'secrets'}: there are values that the writer does not know; nothing was written
--          {'refused', 'memory' | 'open' | 'pace', tenant, amount in use, bound, when to try again in ms}
--          {'pool', pool, tenant, the pools that the tenant may use, with commas}: it may not use this one
--          'appended' and 'duplicate' end with the conversation's demand, see store.with_acks
-- The functions of this library may bring the arguments themselves, as `call`.
local function append(keys, args, call)
  local a = start(keys, args, call)
  if a.call.secrets and not secrets.are_known(a.base, a.call.secrets, a.call.sample) then return {'secrets'} end
  local reply = check[a.call.by](a)
  if reply then return reply[1] == 'duplicate' and store.with_acks(reply, a.found[ACKS]) or reply end
  if has_another_key(a) then return {'locked'} end
  local stopped = a.call.by == 'producer' and string.match(a.call.key, STOPPED)
  if (a.call.by == 'tool' or a.call.by == 'producer') and results.must_wait(a.base) then
    local gap = a.call.by == 'producer' and string.match(a.call.key, '^gap:(.*)$')
    if gap then results.leave_gap(a.shard, a.base, a.cid, gap, a.found[OWNER], a.found[RUNG], a.now)
    elseif stopped then
      local capability, bytes = a.call.capability, a.args[3]
      results.leave_stop(a.shard, a.base, a.cid, stopped, capability, bytes, a.found[OWNER], a.found[RUNG], a.now)
    elseif a.call.by == 'producer' then return {err = 'NOPERM this user may not add to a log'}
    else
      results.leave(a.shard, a.base, a.cid, a.call, a.args[3], a.found[OWNER], a.found[RUNG], a.now)
      acknowledge(a)
    end
    return store.with_acks({'appended', a.last + 1, a.last + 1}, a.found[ACKS])
  end
  if a.call.by == 'create' then create(a) end
  local update, relabels = fields_of(a)
  cancel_actions(a)
  write_events(a)
  if stopped then results.forget_grant(a.base, stopped) end
  write_fields(a, update, relabels)
  leave_word(a)
  notify(a)
  return store.with_acks({'appended', a.first, a.last}, a.found[ACKS] or given(a.call.fields, 'acks'))
end

results.append = append

redis.register_function('deck_append', append)
