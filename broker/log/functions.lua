#!lua name=deckhands
-- The atomic operations of the store. Loaded once at deploy; roles call them with FCALL and need no EVAL.
--
-- Every function takes base names as KEYS (all in one hash slot) and derives the real keys from them:
--   conversation base  deck:{k}:c:<id>   :events :meta :once :snapshot
--   shard base         deck:{k}          :ready :ready:interactive :unread :parked :workers :index :takeovers :dead
--                                        :unreadable :tenants :turns:<stream>… :open:<tenant> :paces
--                                        :notices :awaited :expiring :hooked :news :webhooks :refused
--                                        :worker:<id>:owned|mail|about   :act:<route>   :nodes   :label:<name>=<value>
-- Replies are arrays whose first element names the outcome. Times are milliseconds of the shard's time, which the beats
-- keep and no jump of a clock moves; only what `ls` shows is the server's clock.
-- Nothing here decides by a clock whether a write is allowed; clocks only decide when to take over.

local CONTROLLERS, TOOLS, DOORS = 'controllers', 'tools', 'doors'
local NODE_PATIENCE_MS = 120000
local USUAL_TTL_MS = 1700       -- how long a heartbeat holds where the store is fast
local FIRST_LOOK_MS = 5000       -- when a door looks at an awaited conversation that no notice has led it to
local UNREAD_MS = 10000          -- how long a stream of interactive work is kept when nobody reads it any more
local NODES_LOOKED_AT = 16       -- by each action that comes into the line of a pool
local NODES_AT_ONCE, LEFT_AT_ONCE = 64, 1000  -- of lost nodes with each beat, and of entries of each
local MOST_CARRIED_BYTES = 16384  -- of an observation that reaches the owner with its notification
local CLOCKS_DIFFER_MS = 600000  -- by how much the clocks of two machines may differ that are both thought to be right
-- What everybody needs of a shard: a key of another type among these is moved out of the way.
local KINDS = {ready = 'stream', takeovers = 'stream', unreadable = 'stream', unread = 'zset', parked = 'zset',
  workers = 'zset', index = 'zset', dead = 'zset', nodes = 'zset', clock = 'hash', notices = 'stream', awaited = 'zset',
  ['ready:interactive'] = 'stream', tenants = 'hash', paces = 'hash', expiring = 'zset', hooked = 'hash', news = 'zset',
  refused = 'hash'}
-- And what doors need of the first one; users of other roles may not reach it.
local FIRST_SHARD, KINDS_OF_THE_FIRST = 'deck:{0}', {revoked = 'zset'}

local function keep_kinds(shard)
  for name, kind in pairs(KINDS) do is_there(shard, shard .. ':' .. name, kind) end
end

local function keep_kinds_of_role(shard, role)
  if role ~= 'door' or shard ~= FIRST_SHARD then return end
  for name, kind in pairs(KINDS_OF_THE_FIRST) do is_there(shard, shard .. ':' .. name, kind) end
end

local function make_group(shard, stream, name)
  if not group_of(shard, stream, name) then redis.call('XGROUP', 'CREATE', stream, name, '0', 'MKSTREAM') end
end

local function id_parts(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

-- Where an entry is, from '<stream>|<entry>', or from '<entry>' alone in the usual stream.
local function place_in(text, usual)
  local stream, entry = string.match(text, '^(.*)|(.*)$')
  return stream or usual, entry or text
end

-- The same as a text. An entry of the usual ready stream is its id alone, as it always was.
local function ready_place(shard, stream, entry)
  return stream == shard .. ':ready' and entry or stream .. '|' .. entry
end

-- The ready stream of a class. The interactive one is there once a worker has registered that reads it.
local function ready_stream(shard, class)
  local first = shard .. ':ready:interactive'
  if class == '0' and redis.call('EXISTS', first) == 1 then return first end
  return shard .. ':ready'
end

-- Put a conversation whose turn it is into the ready stream, unless somebody has claimed it meanwhile.
local function hand_over_ready(shard, stream, cid)
  local meta = shard .. ':c:' .. cid .. ':meta'
  if get(meta, 'ready_id') ~= ready_place(shard, stream, WAITING) then return false end
  redis.call('HSET', meta, 'ready_id', ready_place(shard, stream, redis.call('XADD', stream, '*', 'c', cid)))
  return true
end

-- Notify of new events of a conversation: its owner by the mailbox, or any worker by the ready stream if it has no owner.
-- Coalesced: nothing is added while an earlier notification has not been answered (meta.rung).
local function notify_unless(notified, owner, shard, meta, cid, now)
  if notified then return end
  if owner then
    redis.call('XADD', shard .. ':worker:' .. owner .. ':mail', '*', 'c', cid)
    redis.call('HSET', meta, 'rung', '1')
  else
    local class, tenant = unpack(redis.call('HMGET', meta, 'class', 'tenant'))
    local stream = ready_stream(shard, class)
    local waits = line_up(shard, stream, CONTROLLERS, cid, class, tenant)
    local entry = waits and WAITING or redis.call('XADD', stream, '*', 'c', cid)
    redis.call('HSET', meta, 'rung', '1', 'ready_id', ready_place(shard, stream, entry))
    redis.call('ZADD', shard .. ':unread', now, cid)
    if waits then pump(shard, stream, CONTROLLERS, hand_over_ready) end
  end
end

local function notify(shard, meta, cid, now)
  local found = redis.call('HMGET', meta, 'rung', 'owner')
  notify_unless(found[1], found[2], shard, meta, cid, now)
end

local function notify_again(shard, meta, cid, now)
  redis.call('HDEL', meta, 'rung')
  notify(shard, meta, cid, now)
end

local function is_owner(meta, worker, token)
  return get(meta, 'owner') == worker and get(meta, 'token') == token
end

-- The set of what a worker owns. One of another type is moved out of the way, and found out again by the conversations.
local function owned_by(shard, worker)
  local key = shard .. ':worker:' .. worker .. ':owned'
  local kind = redis.call('TYPE', key)['ok']
  if kind == 'set' or kind == 'none' then return key end
  is_there(shard, key, 'set')
  for _, cid in ipairs(redis.call('ZRANGE', shard .. ':index', 0, -1)) do
    if redis.pcall('HGET', shard .. ':c:' .. cid .. ':meta', 'owner') == worker then redis.call('SADD', key, cid) end
  end
  return key
end

-- Whether no tool worker of a node has sent a heartbeat for so long that its workspaces continue elsewhere. A node that
-- was never seen gets the time that others have.
local function is_lost(shard, node)
  local now, deadline = now_ms(shard), redis.call('ZSCORE', shard .. ':nodes', node)
  if deadline then return tonumber(deadline) < now end
  redis.call('ZADD', shard .. ':nodes', now + NODE_PATIENCE_MS, node)
  return false
end

-- Take a conversation off its node; a directory that somebody gave us is where it is, and nowhere else.
local function unbind(meta)
  if not string.find(get(meta, 'workspace') or '', '"path":null', 1, true) then return false end
  redis.call('HDEL', meta, 'node')
  redis.call('HINCRBY', meta, 'moves', 1)
  return true
end

local WAITING_FOR_POOL = WAITING .. ' p'

local function add_action(stream, once, cid, action, bytes, workspace, is_for_pool)
  local fields = {'c', cid, 'a', action, 'e', bytes, 'w', workspace}
  if is_for_pool then
    fields[#fields + 1] = 'p'
    fields[#fields + 1] = '1'
  end
  redis.call('HSET', once, 'q:' .. action, stream .. '|' .. redis.call('XADD', stream, '*', unpack(fields)))
end

-- Put an action whose turn it is into its stream, unless it has been settled or sent elsewhere meanwhile.
local function hand_over_action(shard, stream, member)
  local cid, action = string.match(member, '^(.*) (%d+)$')
  if not cid then return false end
  local base = shard .. ':c:' .. cid
  local once, place = base .. ':once', get(base .. ':once', 'q:' .. action)
  if place ~= stream .. '|' .. WAITING and place ~= stream .. '|' .. WAITING_FOR_POOL then return false end
  local found = redis.call('XRANGE', base .. ':events', action .. '-0', action .. '-0')
  if #found == 0 then  -- the log has lost it
    redis.call('HDEL', once, 'q:' .. action)
    return false
  end
  local workspace = get(base .. ':meta', 'workspace') or ''
  add_action(stream, once, cid, action, found[1][2][2], workspace, place == stream .. '|' .. WAITING_FOR_POOL)
  return true
end

-- The action streams that a worker said it reads. A hash that was forged must not have other keys tended as such.
local function streams_of(shard, worker)
  local found, root = {}, shard .. ':act:'
  for stream in string.gmatch(get(shard .. ':worker:' .. worker .. ':about', 'streams') or '', '%S+') do
    if string.sub(stream, 1, #root) == root then found[#found + 1] = stream end
  end
  return found
end

-- The line of a node beside the one of a pool's stream, nil for any other stream.
local function line_beside(shard, stream, node)
  local name = string.sub(stream, #shard + 1)
  local lane = string.match(name, '^(:act:)pool:') or string.match(name, '^(:act:interactive:)pool:')
  return lane and node and shard .. ':turns' .. lane .. 'node:' .. node
end

-- Whether each node that is there has its own line, so that none waits for what comes into a pool's line.
local function all_nodes_have_lines(shard, stream)
  local nodes = redis.call('ZRANGEBYSCORE', shard .. ':nodes', now_ms(shard), '+inf', 'LIMIT', 0, NODES_LOOKED_AT)
  for _, node in ipairs(nodes) do
    local line = line_beside(shard, stream, node)
    if not line or not has_waiting(line) then return false end
  end
  return #nodes > 0 and #nodes < NODES_LOOKED_AT
end

-- Fill the window of an action stream. A node takes from the line of a pool what would be next in its own line.
local function pump_actions(shard, stream, node)
  if not has_waiting(turns_of(shard, stream)) then return end
  local line, may_go = line_beside(shard, stream, node), nil
  if line and has_waiting(line) then
    may_go = function(class, member)
      local cid = string.match(member, '^(.*) %d+$')
      local tenant = cid and redis.pcall('HGET', shard .. ':c:' .. cid .. ':meta', 'tenant')
      return goes_before(shard, line, class, type(tenant) == 'string' and tenant or '')
    end
  end
  pump(shard, stream, TOOLS, hand_over_action, may_go)
end

-- Put an action on the action stream of its conversation's node, or of its pool while it has none. One that wants a
-- certain pool ('pool:<name>') goes to that pool wherever the workspace is, and says so ('p'). The stream of interactive
-- actions is there once a worker has registered that reads it.
local function enqueue(shard, meta, once, cid, action, bytes, wanted)
  local found = redis.call('HMGET', meta, 'node', 'pool', 'workspace', 'class', 'tenant')
  local node, pool, workspace, class, tenant = unpack(found)
  local route = wanted
  if not route then
    local is_bound = node and not (is_lost(shard, node) and unbind(meta))
    route = is_bound and 'node:' .. node or 'pool:' .. (pool or 'bash')
  end
  local stream = shard .. ':act:' .. route
  if class == '0' then
    local first = shard .. ':act:interactive:' .. route
    if redis.call('EXISTS', first) == 1 then stream = first end
  end
  if line_up(shard, stream, TOOLS, cid .. ' ' .. action, class, tenant) then
    redis.call('HSET', once, 'q:' .. action, stream .. '|' .. (wanted and WAITING_FOR_POOL or WAITING))
    if not all_nodes_have_lines(shard, stream) then pump_actions(shard, stream) end
  else
    add_action(stream, once, cid, action, bytes, workspace or '', wanted)
  end
end

-- Acknowledge an action's entry, given as '<stream>|<entry>'; one that lines up has none.
local function acknowledge(place)
  local stream, entry = string.match(place, '^(.*)|(.*)$')
  if stream and id_parts(entry) then redis.call('XACK', stream, TOOLS, entry) end
end

local function id_after(a, b)
  local a_ms, a_seq = id_parts(a)
  local b_ms, b_seq = id_parts(b)
  if a_ms ~= b_ms then return a_ms > b_ms end
  return a_seq > b_seq
end

-- Whether an entry still waits to be delivered to a group ('queued'), was delivered to a live worker ('delivered'),
-- or is in nobody's hands ('lost').
local function delivery_state(shard, stream, group, entry)
  if not id_parts(entry) or redis.call('EXISTS', stream) == 0 then return 'lost' end
  if #redis.call('XRANGE', stream, entry, entry) == 0 then return 'lost' end
  local found = group_of(shard, stream, group)
  if not found or id_after(entry, found['last-delivered-id']) then return 'queued' end
  local pending = redis.call('XPENDING', stream, group, entry, entry, 1)
  if #pending == 1 and alive(shard, pending[1][2]) then return 'delivered' end
  return 'lost'
end

-- The outcome of an append that an earlier call has made, from '<first>:<last>'.
local function written_before(range)
  local first, last = string.match(range, '(%d+):(%d+)')
  return {'duplicate', tonumber(first), tonumber(last)}
end

-- The checksum of an event, eight hex digits; nil: the log has no such event.
local function checksum_of(base, id)
  local found = redis.call('XRANGE', base .. ':events', id .. '-0', id .. '-0')
  return #found == 1 and string.format('%02x%02x%02x%02x', string.byte(found[1][2][2], 3, 6)) or nil
end

-- Whether the log still has an event as a caller remembers it: by its id and its checksum ('' or nil: unchecked). A store
-- that lost its tail gives the numbers of lost events to others.
local function remembers(base, id, checksum)
  return not checksum or checksum == '' or checksum_of(base, id) == checksum
end

-- Whether a writer knows every value that it has to hide. Values are only added, so their number says it, and one of
-- them that it belongs to this life of the id: each is encrypted with its own nonce. Those of a conversation that borrows
-- another one's may be in another slot: its writers look them up.
local function knows_secrets(base, count, sample)
  local masked, lender = base .. ':masked', base .. ':secrets_of'
  if count == 0 then return redis.call('EXISTS', masked, lender) == 0 end
  return redis.call('SCARD', masked) == count and redis.call('SISMEMBER', masked, sample or '') == 1
    and redis.call('EXISTS', lender) == 0
end

-- What is kept of the secrets: {current values by name, every value, the lender or ''}; {} where there are none.
local function secrets_of(base)
  local masked, lender = base .. ':masked', base .. ':secrets_of'
  if redis.call('EXISTS', masked, lender) == 0 then return {} end
  return {redis.call('HGETALL', base .. ':secrets'), redis.call('SMEMBERS', masked), redis.call('GET', lender) or ''}
end

-- Notify the owner of an observation and give it along, so that it need not be read. Such a notification needs no answer
-- (meta.rung stays as it is): later events have their own. `before` is the checksum of the event that it follows here.
local function hand_to_owner(shard, base, owner, cid, id, bytes, before)
  local mail = {'c', cid, 'i', id, 'e', bytes, 'p', before}
  if redis.call('EXISTS', base .. ':watched') == 1 then
    mail[#mail + 1] = 'w'
    mail[#mail + 1] = '1'
  end
  redis.call('XADD', shard .. ':worker:' .. owner .. ':mail', '*', unpack(mail))
end

-- The indexes of labels that a conversation stands in. They are kept as JSON; neither names nor values need escapes.
-- Its tenant has one too, as a label without a name.
local function label_keys(shard, meta)
  local found = {}
  local tenant = get(meta, 'tenant')
  if tenant then found[1] = shard .. ':label:=' .. tenant end
  for name, value in string.gmatch(get(meta, 'labels') or '', '"([^"\\]*)": "([^"\\]*)"') do
    found[#found + 1] = shard .. ':label:' .. name .. '=' .. value
  end
  return found
end

-- What a conversation is created with and keeps: no later append changes whose it is.
local FIXED = {class = true, tenant = true, open_in = true}

-- The value of one of the fields that `append` is given, as {name, value, …}.
local function given(fields, name)
  for at = 1, #fields, 2 do
    if fields[at] == name then return fields[at + 1] end
  end
  return nil
end

-- Note when a conversation that is created may begin, given as {delay_ms = from now, limit_ms = until it expires},
-- either of them nil. Returns whether it has to wait.
local function plan(shard, meta, cid, now, wall, start)
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

-- What stands against an append of a producer: the conversation is at work and takes no message then, or it need not
-- expire any more.
local function is_refused(condition, policy, busy, planned)
  if condition == 'expire' then return planned ~= 'waiting' end
  local asked = string.match(condition, '^message:(.*)$')
  if not asked then return false end
  if asked ~= '' then policy = asked end
  return policy == 'reject' and busy == '1'
end

-- Note the first event of a conversation that webhooks have not heard of, if its tenant has any, see told.
local function add_news(shard, cid, tenant, first)
  if not is_there(shard, shard .. ':hooked', 'hash') then return end
  local its, everybodys = unpack(redis.call('HMGET', shard .. ':hooked', tenant or '', '*'))
  if not its and not everybodys then return end
  is_there(shard, shard .. ':news', 'zset')
  local known = redis.call('ZSCORE', shard .. ':news', cid)
  if not known or tonumber(known) > first then redis.call('ZADD', shard .. ':news', first, cid) end
end

-- append: the only way into a log.
-- KEYS  conversation base, shard base
-- ARGV  cid, the arguments below in a map of MessagePack, the bytes of each event …
--   by 'create'    key, pool   the conversation must not exist
--                  awaited: who waits for its end, or nil
--                  inner: it is part of another one's step, and neither refused nor counted; else elsewhere: how many
--                  conversations of the tenant are open in other shards, see admission.lua
--                  start: when it may begin, see plan, or nil
--   by 'producer'  key
--                  quiet: notify nobody
--                  condition 'message:<policy>': a person's message, refused while the agent works if the policy, by
--                  default the conversation's, is 'reject'; 'expire': refused unless the conversation waits to begin
--                  seen: the event that has to be the last one, or nil
--   by 'tool'      worker, action, checksum of the action, see remembers
--                  place: '<stream>|<entry>' to acknowledge, or nil
--   by 'owner'     worker, token
--                  seen, checksum: of the last event the decision rests on
--                  key: of this very call, the same when it is repeated
--   events   for each one: dispatch '1': a runnable action to put on its action stream; 'pool:<name>': on that pool's
--            answers: the action that an observation settles
--   fields   what `ls` shows: {name, value, …}; or nil
--   cancels  running actions to be stopped; '0': all programs of the workspace; or nil
--   secrets  how many values of the conversation the writer knows and hides; nil: it has looked them up
--   sample   one of these values, as it is encrypted
-- What an owner appends to a conversation that is waited for leaves one notice for the doors (meta.noticed until read).
-- returns  {'appended', first, last} {'duplicate', first, last} {'fenced'} {'conflict', last} {'closed'} {'missing'}
--          {'exists'} {'busy'} {'lost', last}: the log does not hold what the writer remembers
--          {'secrets'}: there are values that the writer does not know; nothing was written
--          {'refused', 'memory' | 'open' | 'pace', tenant, how much there is, how much may be, when to try again in ms}
local function append(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, once, events = base .. ':meta', base .. ':once', base .. ':events'
  local cid, call = args[1], cmsgpack.unpack(args[2])
  local by, condition, place, fields = call.by, call.condition or '', call.place, call.fields or {}
  if call.secrets and not knows_secrets(base, call.secrets, call.sample) then return {'secrets'} end
  local now, wall, hooked = times_ms(shard)
  -- All that is read of the conversation, at once: a call into the server costs more than the work it does here.
  local found = redis.call('HMGET', meta, 'last_id', 'closed', 'node', 'owner', 'token', 'rung', 'append_key',
    'append_ids', 'crashes', 'mark', 'awaited', 'noticed', 'open_in', 'created_ms', 'double_texting', 'busy', 'planned',
    'tenant')
  local last, closed, node, owner, token, notified, append_key, append_ids, crashes, mark, awaited, noticed, open_in,
    created, policy, busy, planned, tenant = unpack(found)
  last = last and tonumber(last)

  local remember
  local this_call = by == 'owner' and call.token .. ':' .. call.seen .. ':' .. call.key .. call.checksum
  local must_wait = call.quiet
  if by == 'create' then
    remember = 'create:' .. call.key
    if last then
      local range = get(once, remember)
      if not range then return {'exists'} end
      return written_before(range)
    end
    if not call.inner then
      local refusal, name, whole = admission(shard, given(fields, 'tenant') or '', call.elsewhere, now)
      if refusal then return refusal end
      open_in, created = name, wall
      redis.call('HSET', meta, 'open_in', name)
      count_open(shard, name, cid, given(fields, 'state'), wall)
      if whole then redis.call('HSET', shard .. ':paces', name, string.format('%.0f', whole)) end
    end
    last = 0
    redis.call('HSET', meta, 'created_ms', wall, 'pool', call.pool)
    redis.call('ZADD', shard .. ':index', wall, cid)
    if call.awaited then
      redis.call('HSET', meta, 'awaited', call.awaited)
      redis.call('ZADD', shard .. ':awaited', now + FIRST_LOOK_MS, cid)
    end
    must_wait = call.start and plan(shard, meta, cid, now, wall, call.start)
  elseif not last then
    return {'missing'}
  elseif by == 'owner' then
    if owner ~= call.worker or token ~= call.token then return {'fenced'} end
    if append_key == this_call then return written_before(append_ids) end
    if not remembers(base, call.seen, call.checksum) then return {'lost', last} end
    if tonumber(call.seen) ~= last then return {'conflict', last} end
  else
    remember = by == 'tool' and 'o:' .. call.action or 'p:' .. call.key
    if by == 'tool' and not remembers(base, call.action, call.checksum) then
      if place then acknowledge(place) end
      return {'lost', last}
    end
    local range = get(once, remember)
    if range or closed then
      if place then acknowledge(place) end
      return range and written_before(range) or {'closed'}
    end
    if by == 'producer' and is_refused(condition, policy, busy, planned) then return {'busy'} end
    if by == 'producer' and call.seen and tonumber(call.seen) ~= last then return {'conflict', last} end
  end
  if closed then return {'closed'} end

  local relabels, update = false, {'updated_ms', wall}
  for at = 1, #fields, 2 do
    local name, value = fields[at], fields[at + 1]
    if by == 'create' or not FIXED[name] then
      update[#update + 1] = name
      update[#update + 1] = value
      relabels = relabels or name == 'labels'
    end
    if by ~= 'create' and open_in and name == 'state' then count_open(shard, open_in, cid, value, created or wall) end
  end
  if node then
    for _, action in ipairs(call.cancels or {}) do
      local order = action == '0' and 'close' or 'cancel'
      redis.call('XADD', shard .. ':act:node:' .. node, '*', 'c', cid, 'a', action, 'x', order)
    end
  end
  local first, n = last + 1, #call.events
  for at, event in ipairs(call.events) do
    local bytes, dispatch, answers = args[at + 2], event.dispatch, event.answers
    last = last + 1
    redis.call('XADD', events, last .. '-0', 'e', bytes)
    if dispatch then enqueue(shard, meta, once, cid, last, bytes, dispatch ~= '1' and dispatch or nil) end
    if answers then
      redis.call('HSET', once, 'o:' .. answers, last .. ':' .. last)
      redis.call('HDEL', once, 'q:' .. answers, 'w:' .. answers, 'n:' .. answers, 'm:' .. answers)
    end
  end
  local ids = first .. ':' .. last
  update[#update + 1] = 'last_id'
  update[#update + 1] = last
  if by == 'owner' then
    -- An append without events leaves the last id where it was: it must not pass for the append that moves it.
    if n > 0 then
      for _, value in ipairs({'append_key', this_call, 'append_ids', ids}) do
        update[#update + 1] = value
      end
    end
  elseif by ~= 'tool' then  -- a tool's append is remembered by the action that it answers
    redis.call('HSET', once, remember, ids)
    redis.call('ZREM', shard .. ':dead', cid)
    -- Until its owner says otherwise; a message to a conversation that has not begun belongs to its task.
    if planned ~= 'waiting' and string.find(condition, '^message:') then redis.call('HSET', meta, 'busy', '1') end
  end
  if relabels and by ~= 'create' then
    for _, key in ipairs(label_keys(shard, meta)) do
      if is_there(shard, key, 'zset') then redis.call('ZREM', key, cid) end
    end
  end
  redis.call('HSET', meta, unpack(update))
  if relabels or by == 'create' then
    for _, key in ipairs(label_keys(shard, meta)) do
      is_there(shard, key, 'zset')
      redis.call('ZADD', key, created or wall, cid)
    end
  end
  if by == 'owner' and (crashes or mark) then redis.call('HDEL', meta, 'crashes', 'mark') end
  if awaited and not noticed and (by == 'owner' or condition == 'expire') then
    redis.call('XADD', shard .. ':notices', '*', 'c', cid)
    redis.call('HSET', meta, 'noticed', '1')
  end
  if hooked and n > 0 then add_news(shard, cid, by == 'create' and given(fields, 'tenant') or tenant, first) end
  if condition == 'expire' then
    redis.call('ZREM', shard .. ':expiring', cid)
    redis.call('ZREM', shard .. ':parked', cid)
  end
  if by ~= 'owner' then
    if place then acknowledge(place) end
    if by == 'tool' and owner and not notified and n == 1 and #args[3] <= MOST_CARRIED_BYTES then
      local is_behind_action = tostring(last - 1) == call.action and call.checksum ~= ''
      local before = is_behind_action and call.checksum or checksum_of(base, last - 1)
      hand_to_owner(shard, base, owner, cid, last, args[3], before or '')
    elseif not must_wait and condition ~= 'expire' then notify_unless(notified, owner, shard, meta, cid, now) end
  end
  return {'appended', first, last}
end

-- claim: become the owner of a conversation nobody owns.
-- ARGV  cid, worker, ready entry to acknowledge or '', and, of those who want to know whose turn it is, the name of the
--       stream that it came from: 'ready' or 'ready:interactive'
-- returns  {'claimed', token, last, crashes, node or '', closed '1' or ''} {'yours'} {'owned'} {'missing'} {'swept'}
--          to those who want to know, 'claimed' ends with class, share and the share's weight
local function claim(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, cid, worker, entry = base .. ':meta', args[1], args[2], args[3]
  if not alive(shard, worker) then return {'swept'} end
  if entry ~= '' then
    local stream = shard .. ':' .. (args[4] == 'ready:interactive' and args[4] or 'ready')
    redis.call('XACK', stream, CONTROLLERS, entry)
    pump(shard, stream, CONTROLLERS, hand_over_ready)
  end
  local last = tonumber(get(meta, 'last_id'))
  if not last then
    redis.call('ZREM', shard .. ':unread', cid)
    return {'missing'}
  end
  local owner, now = get(meta, 'owner'), now_ms(shard)
  if owner == worker then return {'yours'} end
  if owner and alive(shard, owner) then
    notify_again(shard, meta, cid, now)
    return {'owned'}
  end
  local owned = owned_by(shard, worker)  -- before anything is written: half a claim would be nobody's
  local before = tonumber(get(meta, 'token')) or 0
  local token = before + 1
  if now > token then token = now end
  token = string.format('%.0f', token)
  redis.call('HSET', meta, 'owner', worker, 'token', token)
  redis.call('HDEL', meta, 'rung', 'ready_id', 'mark')
  redis.call('ZREM', shard .. ':unread', cid)
  redis.call('ZREM', shard .. ':parked', cid)
  redis.call('SADD', owned, cid)
  local from = get(meta, 'orphan_of')
  if from then
    redis.call('HDEL', meta, 'orphan_of')
    redis.call('XADD', shard .. ':takeovers', 'MAXLEN', '~', 10000, '*', 'c', cid, 'from', from, 'to', worker, 'at', now)
  end
  local claimed = {'claimed', token, last, tonumber(get(meta, 'crashes')) or 0, get(meta, 'node') or '',
    get(meta, 'closed') or ''}
  if args[4] then
    local class, tenant = unpack(redis.call('HMGET', meta, 'class', 'tenant'))
    local share, weight = share_of(shard, tenant or '')
    for _, part in ipairs({class or '1', share, string.format('%.6f', weight)}) do claimed[#claimed + 1] = part end
  end
  return claimed
end

-- release: give a conversation up, unless it has new events.
-- ARGV  cid, worker, token, id of the last event seen, for how many ms to park it or '', checksum of that event
-- returns  {'released'} {'news', last} {'fenced'} {'lost', last}
local function release(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, cid, worker, token, seen, delay = base .. ':meta', args[1], args[2], args[3], args[4], args[5]
  if not is_owner(meta, worker, token) then return {'fenced'} end
  local last = get(meta, 'last_id')
  if not remembers(base, seen, args[6]) then return {'lost', tonumber(last)} end
  if last ~= seen then return {'news', tonumber(last)} end
  local owned = owned_by(shard, worker)
  redis.call('HDEL', meta, 'owner', 'rung', 'mark', 'crashes')
  redis.call('SREM', owned, cid)
  if delay ~= '' then redis.call('ZADD', shard .. ':parked', now_ms(shard) + tonumber(delay), cid) end
  return {'released'}
end

-- due: whether a conversation that waits to begin may begin.  ARGV worker, token.
-- returns  {'due'} {'wait', ms} {'expired'} {'fenced'}
local function due(keys, args)
  local meta = keys[1] .. ':meta'
  if not is_owner(meta, args[1], args[2]) then return {'fenced'} end
  local now, expires, begins = now_ms(keys[2]), number_of(get(meta, 'expires_ms')), number_of(get(meta, 'due_ms'))
  if expires and expires <= now then return {'expired'} end
  if begins and begins > now then return {'wait', begins - now} end
  return {'due'}
end

-- mark: say that the conversation is being stepped ('1') or no longer ('0'); a worker that dies between is its victim.
-- ARGV  worker, token, '1' or '0'.  returns {'marked'} {'fenced'}
local function mark(keys, args)
  local meta = keys[1] .. ':meta'
  if not is_owner(meta, args[1], args[2]) then return {'fenced'} end
  if args[3] == '1' then redis.call('HSET', meta, 'mark', '1') else redis.call('HDEL', meta, 'mark') end
  return {'marked'}
end

-- snapshot: keep the owner's snapshot.  ARGV worker, token, bytes, id of the last event in it and its checksum
-- returns {'kept'} {'fenced'} {'lost', last}
local function snapshot(keys, args)
  if not is_owner(keys[1] .. ':meta', args[1], args[2]) then return {'fenced'} end
  if not remembers(keys[1], args[4], args[5]) then return {'lost', tonumber(get(keys[1] .. ':meta', 'last_id') or 0)} end
  redis.call('SET', keys[1] .. ':snapshot', args[3])
  return {'kept'}
end

-- close: refuse every further event.  ARGV cid.  returns {'closed'} {'missing'}
local function close(keys, args)
  local meta, shard, cid = keys[1] .. ':meta', keys[2], args[1]
  if not get(meta, 'last_id') then return {'missing'} end
  redis.call('HSET', meta, 'closed', '1')
  redis.call('ZREM', shard .. ':dead', cid)
  local node, open_in = get(meta, 'node'), get(meta, 'open_in')
  if open_in then count_open(shard, open_in, cid, 'finished') end
  if node then redis.call('XADD', shard .. ':act:node:' .. node, '*', 'c', cid, 'a', '0', 'x', 'close') end
  return {'closed'}
end

-- begin_deletion: take no more events, for good; `end_deletion` forgets the conversation. Until then it is listed.
-- ARGV  cid, id of the last event of a log that has been found settled
-- returns  {'begun'} {'owned', worker} {'news', last} {'missing'}
local function begin_deletion(keys, args)
  local meta, shard, cid = keys[1] .. ':meta', keys[2], args[1]
  local last, owner = get(meta, 'last_id'), get(meta, 'owner')
  if not last then return {'missing'} end
  if owner and alive(shard, owner) then return {'owned', owner} end
  if get(meta, 'awaited') then return {'owned', 'a door, which has to tell its caller'} end
  if last ~= args[2] then return {'news', tonumber(last)} end
  redis.call('HSET', meta, 'closed', '1', 'deleted', '1')
  return {'begun'}
end

-- end_deletion: forget a conversation whose deletion was begun: its keys, and where others name it. Blobs and files are
-- named by its log, so they go before.
-- ARGV  cid.  returns  {'deleted'} {'kept'} {'missing'}   kept: its deletion was not begun
local function end_deletion(keys, args)
  local base, shard, cid = keys[1], keys[2], args[1]
  local meta = base .. ':meta'
  if not get(meta, 'last_id') then return {'missing'} end
  if not get(meta, 'deleted') then return {'kept'} end
  local node, owner = get(meta, 'node'), get(meta, 'owner')
  if node then redis.call('XADD', shard .. ':act:node:' .. node, '*', 'c', cid, 'a', '0', 'x', 'close') end
  if owner then redis.call('SREM', shard .. ':worker:' .. owner .. ':owned', cid) end
  local open_in = get(meta, 'open_in')
  if open_in then count_open(shard, open_in, cid, 'finished') end
  for _, key in ipairs(label_keys(shard, meta)) do
    if is_there(shard, key, 'zset') then redis.call('ZREM', key, cid) end
  end
  for _, name in ipairs({'index', 'unread', 'parked', 'dead', 'awaited', 'expiring', 'news'}) do
    redis.call('ZREM', shard .. ':' .. name, cid)
  end
  local stream, entry = place_in(get(meta, 'ready_id') or '', shard .. ':ready')
  if entry == WAITING then leave_line(shard, stream, cid) end
  for _, name in ipairs({'events', 'once', 'snapshot', 'live', 'watched', 'secrets', 'masked', 'secrets_of', 'caller',
    'caller:lock', 'meta'}) do
    redis.call('UNLINK', base .. ':' .. name)
  end
  return {'deleted'}
end

-- requeue: clear the crashes of a dead letter and notify of it.  ARGV cid.  returns {'requeued'} {'missing'}
local function requeue(keys, args)
  local meta, shard, cid = keys[1] .. ':meta', keys[2], args[1]
  if not get(meta, 'last_id') then return {'missing'} end
  redis.call('HDEL', meta, 'crashes', 'mark')
  redis.call('ZREM', shard .. ':dead', cid)
  notify_again(shard, meta, cid, now_ms(shard))
  return {'requeued'}
end

-- wake: notify of a conversation whose log has not grown: something it waits for has come.  ARGV cid.
-- returns {'rung'} {'missing'}
local function wake(keys, args)
  local meta, shard, cid = keys[1] .. ':meta', keys[2], args[1]
  if not get(meta, 'last_id') then return {'missing'} end
  notify(shard, meta, cid, now_ms(shard))
  return {'rung'}
end

-- dispatch: see to it that an appended action reaches a tool worker; repeating it is harmless.
-- ARGV  cid, worker, token, action id, bytes, 'pool:<name>' or ''
-- returns  {'queued'} {'running', worker} {'settled'} {'enqueued'} {'fenced'}
local function dispatch(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, once, cid, action = base .. ':meta', base .. ':once', args[1], args[4]
  if not is_owner(meta, args[2], args[3]) then return {'fenced'} end
  if get(once, 'o:' .. action) then return {'settled'} end
  local claimer = get(once, 'w:' .. action)
  local queued = get(once, 'q:' .. action)
  if queued then
    local stream, entry = string.match(queued, '^(.*)|(.*)$')
    local is_waiting = entry == WAITING or entry == WAITING_FOR_POOL
    if is_waiting and is_in_line(shard, stream, cid .. ' ' .. action) then return {'queued'} end
    local where = stream and delivery_state(shard, stream, TOOLS, entry)
    if where == 'queued' then return {'queued'} end
    if where == 'delivered' then return {'running', claimer or ''} end
  end
  if claimer and alive(shard, claimer) then return {'running', claimer} end
  enqueue(shard, meta, once, cid, action, args[5], args[6] ~= '' and args[6] or nil)
  return {'enqueued'}
end

-- bind_node: put a workspace that has no node on one; where the conversation is gone, nothing is written.
-- ARGV  node.  returns {'bound', the node that it has} {'missing'}
local function bind_node(keys, args)
  local meta = keys[1] .. ':meta'
  if not get(meta, 'last_id') then return {'missing'} end
  redis.call('HSETNX', meta, 'node', args[1])
  return {'bound', get(meta, 'node')}
end

-- claim_action: take an action up before its side effect. The entry it is claimed with (q:<action>) carries it from
-- then on; copies of it are dropped.
-- ARGV  cid, action id, worker, node, stream, entry, '1' if any node may run it, which then is not bound by it,
--       checksum of the action, see remembers: what the log has lost must not take the number from another action;
--       '1' if the reply is to end with the secrets, see secrets_of
-- returns  {'claimed', attempt, moves} {'reclaimed', attempt, previous worker, moves}   run it, or ask the journal first
--          moves: how often the workspace was taken off a lost node
--          (a worker that repeats its claim, because a reply or its entry came twice, is its own previous worker)
--          {'settled'} {'busy', worker} {'forwarded', node} {'missing'} {'closed'}   acknowledged; nothing to do
--          {'lost', last}   acknowledged: the log does not hold the action
--          {'swept'}   nothing was touched: the entry has been handed on
local function claim_action(keys, args)
  local base, shard = keys[1], keys[2]
  local meta, once = base .. ':meta', base .. ':once'
  local cid, action, worker, node, stream, entry, anywhere, checksum, wants_secrets = unpack(args)
  if not alive(shard, worker) then return {'swept'} end
  -- This entry was taken up: the next one comes from the node's line, or from a pool's.
  pump_actions(shard, stream, node)
  for _, other in ipairs(streams_of(shard, worker)) do
    if other ~= stream then pump_actions(shard, other, node) end
  end
  local place, before = stream .. '|' .. entry, get(once, 'w:' .. action)
  local idle, last = nil, get(meta, 'last_id')
  if not last then idle = {'missing'}
  elseif not remembers(base, action, checksum) then idle = {'lost', tonumber(last)}
  elseif get(once, 'o:' .. action) then idle = {'settled'}
  elseif get(meta, 'closed') then idle = {'closed'}
  elseif before and before ~= worker and alive(shard, before) then idle = {'busy', before} end
  if idle then
    acknowledge(place)
    return idle
  end
  local secrets, bound = wants_secrets == '1' and secrets_of(base) or nil, get(meta, 'node')
  local is_elsewhere = bound and bound ~= node and anywhere ~= '1'
  if is_elsewhere and is_lost(shard, bound) and unbind(meta) then bound = nil
  elseif is_elsewhere then
    local found = redis.call('XRANGE', stream, entry, entry)
    if #found == 1 then enqueue(shard, meta, once, cid, action, pairs_of(found[1][2])['e']) end
    acknowledge(place)
    return {'forwarded', bound}
  end
  local copy = get(once, 'q:' .. action)
  if before == worker and copy and copy ~= place then acknowledge(copy) end
  if not bound and anywhere ~= '1' then redis.call('HSET', meta, 'node', node) end
  redis.call('HSET', once, 'w:' .. action, worker, 'q:' .. action, place)
  local moves = tonumber(get(meta, 'moves')) or 0
  if before == worker then return {'reclaimed', tonumber(get(once, 'n:' .. action)) or 1, worker, moves, secrets} end
  if not before then return {'claimed', redis.call('HINCRBY', once, 'n:' .. action, 1), moves, secrets} end
  -- The first worker that dies with it counts against it, and then only one that died while it acted.
  local attempts = tonumber(get(once, 'n:' .. action)) or 0
  if attempts < 2 or get(once, 'm:' .. action) then attempts = redis.call('HINCRBY', once, 'n:' .. action, 1) end
  redis.call('HDEL', once, 'm:' .. action)
  redis.call('XADD', shard .. ':takeovers', 'MAXLEN', '~', 10000, '*', 'c', cid, 'a', action, 'from', before,
    'to', worker, 'at', now_ms(shard))
  return {'reclaimed', attempts, before, moves, secrets}
end

-- mark_action: say that an action that workers have died with acts ('1') or only waits ('0'). The death of a worker in
-- between counts against it.
-- ARGV  action id, worker, '1' or '0'.  returns {'marked'} {'lost'}
local function mark_action(keys, args)
  local once, action = keys[1] .. ':once', args[1]
  if get(once, 'w:' .. action) ~= args[2] then return {'lost'} end
  if args[3] == '1' then redis.call('HSET', once, 'm:' .. action, '1') else redis.call('HDEL', once, 'm:' .. action) end
  return {'marked'}
end

-- Time in which no worker could beat, because the store was away or its clock jumped, counts against none.
local function extend_deadlines(shard, passed)
  for _, key in ipairs({shard .. ':workers', shard .. ':nodes'}) do
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', key, 1, '+inf')) do
      redis.call('ZADD', key, tonumber(redis.call('ZSCORE', key, name)) + passed, name)
    end
  end
end

-- Keep the shard's time at a beat. A worker's monotonic clock cannot jump, so where it and the server's clock disagree
-- about how long a gap between two beats was, it is right. What it says may have been long under way: `lead`, how far
-- the shard's time is ahead of it, is the least that was seen. It creeps up, so that slow drift does not count.
-- monotonic: the worker's, in ms; nil for nobody who could vouch.  is_believed: then the server's clock counts, but
-- never back.
local function keep_time(shard, worker, ttl, monotonic, is_believed)
  local about, wall = shard .. ':worker:' .. worker .. ':about', wall_ms()
  local said = number_of(get(about, 'ttl_ms')) or USUAL_TTL_MS
  local kept, mine = redis.call('HMGET', shard .. ':clock', 'wall', 'now'), {}
  if monotonic then mine = redis.call('HMGET', about, 'monotonic', 'lead') end
  local seen, least, now = number_of(mine[1]), number_of(mine[2]), wall
  if not seen then least = nil end
  local crept = least and least + (monotonic - seen) / 10
  local beat, before = number_of(kept[1]), number_of(kept[2])
  if not beat and redis.call('EXISTS', shard .. ':hooked') == 1 then
    redis.call('HSET', shard .. ':clock', 'hooked', '1')  -- the one before was lost, or moved out of the way
  end
  if beat and before then
    local step = wall - beat
    local is_gap = step < 0 or step > BEAT_GAP_MS
    now = before + step
    if least then
      if is_gap or now < monotonic + crept - BEAT_GAP_MS then now = monotonic + least end
    elseif is_gap and not is_believed then
      now = before
    end
    now = math.max(now, before)
    -- After a jump the time comes back to the server's clock, by a twentieth of what passes.
    local most = math.min(now - before, BEAT_GAP_MS) / 20
    now = now + math.max(-most, math.min(most, wall - now))
    -- By what this worker said before: its latest word may be a longer one, because the store has become slow for all.
    if now - before > math.min(ttl, said) / 2 then extend_deadlines(shard, math.floor(now - before)) end
  end
  if monotonic then
    local lead = math.min(now - monotonic, crept or math.huge)
    redis.call('HSET', about, 'monotonic', monotonic, 'lead', string.format('%.3f', lead))
  end
  redis.call('HSET', shard .. ':clock', 'wall', wall, 'now', string.format('%.3f', now))
  return math.floor(now)
end

-- What beats and registration keep of a worker; all else in its hash is what it says of itself.
local KEPT_BY_BEATS = {progress = true, beat_ms = true, since_ms = true, ttl_ms = true, monotonic = true, lead = true,
  clock_ms = true}

-- Note what a worker says of itself, from args[at] on: role, n_streams, action stream …, field, value …
-- What somebody else has written there gives way; nothing is written where nothing differs.
local function note_facts(about, args, at)
  local n = tonumber(args[at + 1])
  local facts = {'role', args[at], 'streams', table.concat(args, ' ', at + 2, at + 1 + n), unpack(args, at + 2 + n)}
  local said, flat = pairs_of(facts), redis.call('HGETALL', about)
  local known = pairs_of(flat)
  for i = 1, #flat, 2 do
    if not said[flat[i]] and not KEPT_BY_BEATS[flat[i]] then redis.call('HDEL', about, flat[i]) end
  end
  for i = 1, #facts, 2 do
    if known[facts[i]] ~= facts[i + 1] then redis.call('HSET', about, facts[i], facts[i + 1]) end
  end
end

-- The streams of interactive work that a worker reads, as the fields of `:clock` that say how long somebody reads them.
local function note_reader(shard, about, streams, until_ms)
  local names = get(about, 'interactive') and {':ready:interactive'} or {}
  for _, stream in ipairs(streams) do
    local name = string.sub(stream, #shard + 1)
    if string.find(name, ':act:interactive:pool:', 1, true) == 1 then names[#names + 1] = name end
  end
  for _, name in ipairs(names) do redis.call('HSET', shard .. ':clock', 'read' .. name, until_ms) end
end

-- register: enter a new incarnation of a worker.
-- KEYS shard base.  ARGV worker, ttl_ms, role, n_streams, action stream …, field, value …
--   field 'clock_ms': the clock of its machine; if the server's is another, one of them is wrong
--   field 'interactive': a controller that reads the interactive ready stream
-- returns {'registered', the shard's time}
local function register(keys, args)
  local shard, worker, ttl, role = keys[1], args[1], tonumber(args[2]), args[3]
  local about = shard .. ':worker:' .. worker .. ':about'
  keep_kinds(shard)
  keep_kinds_of_role(shard, role)
  make_group(shard, shard .. ':ready', CONTROLLERS)
  for i = 5, 4 + tonumber(args[4]) do make_group(shard, args[i], TOOLS) end
  if role == 'door' then make_group(shard, shard .. ':notices', DOORS) end
  note_facts(about, args, 3)
  if get(about, 'interactive') then make_group(shard, shard .. ':ready:interactive', CONTROLLERS) end
  local clock = number_of(get(about, 'clock_ms')) or wall_ms()
  local now = keep_time(shard, worker, ttl, nil, math.abs(clock - wall_ms()) < CLOCKS_DIFFER_MS)
  redis.call('ZADD', shard .. ':workers', now + ttl, worker)
  redis.call('HSET', about, 'since_ms', now, 'ttl_ms', ttl)
  note_reader(shard, about, streams_of(shard, worker), now + ttl + UNREAD_MS)
  return {'registered', now}
end

-- Put an entry that a dead worker held back at the end of its stream, unless what it carries is settled, answered, or
-- carried by another entry.
local function give_entry_back(shard, stream, group, entry, fields)
  local about = pairs_of(fields)
  if not about['c'] or (group == TOOLS and not about['a']) then
    note_unreadable(shard, stream, entry, 'an entry without its fields', table.concat(fields, ' ', 1, math.min(#fields, 16)))
    return
  end
  if about['x'] then
    redis.call('XADD', stream, '*', unpack(fields))
    return
  end
  local base, before = shard .. ':c:' .. about['c'], stream .. '|'
  local key, field = base .. ':once', 'q:' .. (about['a'] or '')
  if group == CONTROLLERS then
    key, field = base .. ':meta', 'ready_id'
    before = ready_place(shard, stream, '')
  end
  local carrier = get(key, field)
  if not carrier then return end
  if carrier ~= before .. entry then
    local other, its_entry = place_in(carrier, group == CONTROLLERS and shard .. ':ready' or stream)
    if delivery_state(shard, other, group, its_entry) ~= 'lost' then return end
  end
  redis.call('HSET', key, field, before .. redis.call('XADD', stream, '*', unpack(fields)))
end

-- Give back what a dead worker was handed and did not acknowledge. Returns whether nothing is left.
local function give_back(shard, stream, group, worker, limit)
  if not group_of(shard, stream, group) then return true end
  local pending = redis.call('XPENDING', stream, group, '-', '+', limit, worker)
  for _, item in ipairs(pending) do
    local found = redis.call('XRANGE', stream, item[1], item[1])
    if #found == 1 then
      attempt(shard, stream, item[1], give_entry_back, shard, stream, group, item[1], found[1][2])
    end
    redis.call('XACK', stream, group, item[1])
  end
  if #pending == limit then return false end
  redis.call('XGROUP', 'DELCONSUMER', stream, group, worker)
  return true
end

local function hand_back(shard, worker, cid, now, how)
  local meta = shard .. ':c:' .. cid .. ':meta'
  if get(meta, 'owner') ~= worker then return end
  if how == 'crash' then
    local crashes = tonumber(get(meta, 'crashes')) or 0
    if crashes == 0 or get(meta, 'mark') then crashes = crashes + 1 end
    redis.call('HSET', meta, 'crashes', crashes, 'orphan_of', worker)
    if crashes >= 3 then redis.call('ZADD', shard .. ':dead', now, cid) end
  end
  redis.call('HDEL', meta, 'owner')
  notify_again(shard, meta, cid, now)
end

-- Hand back everything a worker had, at most `limit` things at a time. Returns whether it is done.
-- how  'crash' counts against a conversation the first time, and after that only if the worker died while stepping it
--      (meta.mark); 'leave' does not. A removal ends the way it began, even if another worker completes it.
local function remove_worker(shard, worker, now, limit, how)
  local me = shard .. ':worker:' .. worker
  redis.call('ZADD', shard .. ':workers', 0, worker)
  is_there(shard, me .. ':about', 'hash')
  redis.call('HSETNX', me .. ':about', 'end', how)
  how = get(me .. ':about', 'end')
  local owned = redis.call('SPOP', owned_by(shard, worker), limit)
  table.sort(owned)  -- so that a simulation repeats itself
  for _, cid in ipairs(owned) do
    attempt(shard, shard .. ':c:' .. cid .. ':meta', '', hand_back, shard, worker, cid, now, how)
  end
  if redis.call('SCARD', me .. ':owned') > 0 then return false end
  for _, ready in ipairs({':ready:interactive', ':ready'}) do
    if not give_back(shard, shard .. ready, CONTROLLERS, worker, limit) then return false end
  end
  for _, stream in ipairs(streams_of(shard, worker)) do
    if not give_back(shard, stream, TOOLS, worker, limit) then return false end
  end
  redis.call('ZREM', shard .. ':workers', worker)
  redis.call('DEL', me .. ':mail', me .. ':about', me .. ':owned')
  return true
end

-- Maintain a stream: make its group again if it was lost, give back what a worker was handed after its removal (a
-- server continues to serve the blocked read of a process that is stopped), drop entries that all have acknowledged.
local function maintain_stream(shard, stream, group, node)
  make_group(shard, stream, group)
  local oldest = group_of(shard, stream, group)['last-delivered-id']
  local pending = redis.call('XPENDING', stream, group)
  if pending[1] > 0 then
    oldest = pending[2]
    for _, holder in ipairs(pending[4]) do
      if not alive(shard, holder[1]) then give_back(shard, stream, group, holder[1], 256) end
    end
  end
  redis.call('XTRIM', stream, 'MINID', oldest)
  if group == CONTROLLERS then pump(shard, stream, group, hand_over_ready) else pump_actions(shard, stream, node) end
end

-- Send an entry elsewhere. Returns whether it stays: it is an order, or an action of a directory that is only there.
local function leave_with(shard, node, stream, entry, about)
  local base = shard .. ':c:' .. about['c']
  local meta, once, place = base .. ':meta', base .. ':once', stream .. '|' .. entry
  if about['x'] then return true end
  if not about['e'] or get(once, 'q:' .. about['a']) ~= place then return false end
  if get(meta, 'node') == node and not unbind(meta) then return true end
  enqueue(shard, meta, once, about['c'], about['a'], about['e'])
  acknowledge(place)
  return false
end

-- Put what lines up for a lost node into its stream, whence it leaves with all else.
local function end_line(shard, stream)
  local turns = turns_of(shard, stream)
  for _, class in ipairs(USUAL_ORDER) do
    local queue = turns .. ':' .. class
    if is_there(shard, queue, 'zset') then
      for _, member in ipairs(redis.call('ZRANGE', queue, 0, 999)) do
        attempt(shard, queue, member, hand_over_action, shard, stream, member)
        redis.call('ZREM', queue, member)
      end
    end
    if redis.call('EXISTS', queue) == 0 then redis.call('DEL', queue .. ':shares') end
  end
  if not has_waiting(turns) then redis.call('DEL', turns) end
end

-- Send what waits for a lost node to the pools of its conversations. Entries that have left are removed, so that they do
-- not keep later ones from leaving; so are orders that have piled up, and a stream in which nothing is left.
local function leave_node(shard, node)
  for _, lane in ipairs({':act:interactive:node:', ':act:node:'}) do
    local stream = shard .. lane .. node
    end_line(shard, stream)
    if is_there(shard, stream, 'stream') then
      local found = redis.call('XRANGE', stream, '-', '+', 'COUNT', LEFT_AT_ONCE)
      for _, item in ipairs(found) do
        local about = pairs_of(item[2])
        local stays = attempt(shard, stream, item[1], leave_with, shard, node, stream, item[1], about)
        if not stays or (about['x'] and #found == LEFT_AT_ONCE) then redis.call('XDEL', stream, item[1]) end
      end
      if redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
    end
  end
end

-- A tool worker's beat is its node's; it sees to it that nothing waits for nodes that are lost.
local function maintain_nodes(shard, about, now)
  local node = get(about, 'node')
  if not node then return end
  redis.call('ZADD', shard .. ':nodes', now + (number_of(get(about, 'node_patience_ms')) or NODE_PATIENCE_MS), node)
  -- There may be many that never come back: each beat looks at the next of them.
  local clock = shard .. ':clock'
  local kept = get(clock, 'nodes_left')
  local from = math.max(0, number_of(kept) or 0)
  local lost = redis.call('ZRANGEBYSCORE', shard .. ':nodes', '-inf', now - 1, 'LIMIT', math.floor(from), NODES_AT_ONCE)
  for _, other in ipairs(lost) do attempt(shard, shard .. ':nodes', other, leave_node, shard, other) end
  if #lost == NODES_AT_ONCE then redis.call('HSET', clock, 'nodes_left', from + NODES_AT_ONCE)
  elseif kept then redis.call('HDEL', clock, 'nodes_left') end
end

-- Remove the streams of interactive work that nobody reads any more, because the workers that did were replaced by ones
-- of an earlier version: what is in them is looked for like all that is lost, and then goes where all goes.
local function retire_streams(shard, now)
  local clock = shard .. ':clock'
  local flat = redis.call('HGETALL', clock)
  for i = 1, #flat, 2 do
    local name = string.match(flat[i], '^read(:ready:interactive)$') or string.match(flat[i], '^read(:act:interactive:pool:.+)$')
    if name and (number_of(flat[i + 1]) or 0) < now then
      redis.call('HDEL', clock, flat[i])
      redis.call('DEL', shard .. name)
      forget_line(shard, shard .. name)
    end
  end
end

local function wake_parked(shard, cid, now)
  local meta = shard .. ':c:' .. cid .. ':meta'
  if get(meta, 'last_id') then notify_again(shard, meta, cid, now) end
end

-- Check a notification that nobody has answered. Returns 'rung' when it was lost and is repeated, and 'seen' otherwise.
local function check_notification(shard, cid, now)
  local meta = shard .. ':c:' .. cid .. ':meta'
  local stream, entry = place_in(get(meta, 'ready_id') or '', shard .. ':ready')
  if get(meta, 'owner') or not get(meta, 'last_id') then
    redis.call('ZREM', shard .. ':unread', cid)
    return 'seen'
  end
  local is_waiting = entry == WAITING and is_in_line(shard, stream, cid)
  if is_waiting or delivery_state(shard, stream, CONTROLLERS, entry) == 'queued' then
    redis.call('ZADD', shard .. ':unread', now, cid)
    return 'seen'
  end
  -- Lost, or delivered and not answered: its reader may never have seen the reply that delivered it.
  if id_parts(entry) then redis.call('XACK', stream, CONTROLLERS, entry) end
  notify_again(shard, meta, cid, now)
  return 'rung'
end

-- The conversations whose time to begin is over; those that do not wait any more are forgotten.
local function expired(shard, now)
  local found = {}
  for _, cid in ipairs(redis.call('ZRANGEBYSCORE', shard .. ':expiring', '-inf', now, 'LIMIT', 0, 64)) do
    local meta = shard .. ':c:' .. cid .. ':meta'
    local planned = is_there(shard, meta, 'hash') and redis.call('HMGET', meta, 'planned', 'closed')
    if planned and planned[1] == 'waiting' and not planned[2] then
      found[#found + 1] = cid
      redis.call('ZADD', shard .. ':expiring', now + FIRST_LOOK_MS, cid)  -- one that cannot be ended stands in no way
    else redis.call('ZREM', shard .. ':expiring', cid) end
  end
  return found
end

-- tick: beat, and do what is due for everybody: remove dead workers, wake the parked, notify again where that was lost.
-- KEYS shard base.  ARGV worker, ttl_ms, progress (a number that grows while the worker does), patience_ms,
--      its monotonic clock in ms, and now and then what it says of itself, as register takes it:
--      role, n_streams, action stream …, field, value …
-- returns  {'alive', workers removed, conversations woken, notified again, {expired conversation …}, the shard's time}
--          {'swept'}
--          expired: for a door or a controller worker, which write it into the logs
--          swept: others have taken over everything this worker had
local function tick(keys, args)
  local shard, worker, ttl, patience = keys[1], args[1], tonumber(args[2]), tonumber(args[4])
  local workers, me = shard .. ':workers', shard .. ':worker:' .. worker
  keep_kinds(shard)
  if not alive(shard, worker) then return {'swept'} end
  is_there(shard, me .. ':mail', 'stream')
  owned_by(shard, worker)
  if not is_there(shard, me .. ':about', 'hash') then  -- what it had is found by its removal
    redis.call('ZADD', workers, now_ms(shard) + ttl, worker)
    return {'swept'}
  end
  keep_kinds_of_role(shard, get(me .. ':about', 'role'))
  local monotonic = tonumber(args[5] or '')
  local now = keep_time(shard, worker, ttl, monotonic, not monotonic)
  redis.call('ZADD', workers, now + ttl, worker)
  redis.call('HSET', me .. ':about', 'progress', args[3], 'beat_ms', now, 'ttl_ms', ttl)
  if args[6] then note_facts(me .. ':about', args, 6) end

  local removed = 0
  for _, dead in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', now, 'LIMIT', 0, 4)) do
    if attempt(shard, workers, dead, remove_worker, shard, dead, now, 256, 'crash') then removed = removed + 1 end
  end
  -- A deadline further off than any beat can have set it comes from a clock that has been set back.
  for _, other in ipairs(redis.call('ZRANGEBYSCORE', workers, now + 2 * ttl, '+inf', 'LIMIT', 0, 64)) do
    local about = shard .. ':worker:' .. other .. ':about'
    local theirs = is_there(shard, about, 'hash') and number_of(get(about, 'ttl_ms')) or ttl
    if tonumber(redis.call('ZSCORE', workers, other)) > now + theirs then
      redis.call('ZADD', workers, now + theirs, other)
    end
  end

  local due = redis.call('ZRANGEBYSCORE', shard .. ':parked', '-inf', now, 'LIMIT', 0, 256)
  for _, cid in ipairs(due) do
    redis.call('ZREM', shard .. ':parked', cid)
    attempt(shard, shard .. ':parked', cid, wake_parked, shard, cid, now)
  end

  local notified = 0
  for _, cid in ipairs(redis.call('ZRANGEBYSCORE', shard .. ':unread', '-inf', now - patience, 'LIMIT', 0, 64)) do
    local found = attempt(shard, shard .. ':unread', cid, check_notification, shard, cid, now)
    if found == 'rung' then notified = notified + 1 end
    if not found then redis.call('ZREM', shard .. ':unread', cid) end
  end

  maintain_nodes(shard, me .. ':about', now)
  local role = get(me .. ':about', 'role')
  if role == 'door' then make_group(shard, shard .. ':notices', DOORS) end
  maintain_stream(shard, shard .. ':ready', CONTROLLERS)
  if redis.call('EXISTS', shard .. ':ready:interactive') == 1 then
    maintain_stream(shard, shard .. ':ready:interactive', CONTROLLERS)
  end
  local streams = streams_of(shard, worker)
  for _, stream in ipairs(streams) do maintain_stream(shard, stream, TOOLS, get(me .. ':about', 'node')) end
  note_reader(shard, me .. ':about', streams, now + ttl + UNREAD_MS)
  retire_streams(shard, now)
  return {'alive', removed, #due, notified, role == 'tool' and {} or expired(shard, now), now}
end

-- keep_kind: move a key out of the way that is of another kind, see is_there.
-- KEYS key, base of the shard where it is noted.  ARGV kind.  returns {'there'} {'absent'}
local function keep_kind(keys, args)
  return {is_there(keys[2], keys[1], args[1]) and 'there' or 'absent'}
end

-- admit: whether a conversation may begin now, for those who have to store something before. Nothing is noted.
-- KEYS shard base.  ARGV cid, tenant, how many of its conversations are open in other shards
-- returns {'admitted'} {'refused', …} as append does; one that has begun is admitted
local function admit(keys, args)
  local shard = keys[1]
  if get(shard .. ':c:' .. args[1] .. ':meta', 'last_id') then return {'admitted'} end
  return admission(shard, args[2], tonumber(args[3]) or 0, now_ms(shard)) or {'admitted'}
end

-- set_tenants: say which weights and bounds tenants have, for everybody; see turns.lua and admission.lua.
-- KEYS shard base.  ARGV field, value …   what was said before is forgotten.  returns {'set'}
local function set_tenants(keys, args)
  local key = keys[1] .. ':tenants'
  redis.call('DEL', key)
  for i = 1, #args, 2 do redis.call('HSET', key, args[i], args[i + 1]) end
  return {'set'}
end

-- now: the shard's time.  KEYS shard base.  returns {'now', ms}
local function now(keys)
  return {'now', now_ms(keys[1])}
end

-- leave: a worker that ends in order hands back all it has, a thousand things at a time.
-- KEYS shard base.  ARGV worker.  returns {'left'} {'leaving'}   leaving: call again
local function leave(keys, args)
  if remove_worker(keys[1], args[1], now_ms(keys[1]), 1000, 'leave') then return {'left'} end
  return {'leaving'}
end

-- move_schedule: write how far a schedule has come, unless somebody else has; one that was paused meanwhile stays so.
-- KEYS shard base.  ARGV name, the tick that was looked at (ms) or '', the next one or '', what was known, what is now
-- returns {'moved'} {'gone'} {'other'}
local function move_schedule(keys, args)
  local root, name = keys[1] .. ':schedules', args[1]
  if redis.call('HEXISTS', root, name) == 0 then return {'gone'} end
  local known, due = get(root .. ':standing', name), redis.call('ZSCORE', root .. ':due', name)
  if known and known ~= args[4] then return {'other'} end
  redis.call('HSET', root .. ':standing', name, args[5])
  if due and args[2] ~= '' and tonumber(due) == tonumber(args[2]) then
    if args[3] == '' then redis.call('ZREM', root .. ':due', name)
    else redis.call('ZADD', root .. ':due', args[3], name) end
  end
  return {'moved'}
end

-- put_schedule: write a schedule down, change or remove it, together with its next tick.
-- KEYS shard base.  ARGV name, what was known of it or '', what it is now or '' to remove it, its next tick (ms) or '',
--      how many there may be
-- returns {'put'} {'other'}: it is not what was known  {'full'}
local function put_schedule(keys, args)
  local root, name, known, text, due = keys[1] .. ':schedules', args[1], args[2], args[3], args[4]
  local there = get(root, name) or ''
  if there ~= known and there ~= text then return {'other'} end  -- the same again: a reply was lost
  if text == '' then
    redis.call('HDEL', root, name)
    redis.call('HDEL', root .. ':standing', name)
  else
    if there == '' and redis.call('HLEN', root) >= tonumber(args[5]) then return {'full'} end
    redis.call('HSET', root, name, text)
  end
  if due == '' then redis.call('ZREM', root .. ':due', name)
  else redis.call('ZADD', root .. ':due', 'NX', due, name) end
  return {'put'}
end

-- hold_job: take, keep or give back the place of a job that is done alone.
-- KEYS its key, shard base.  ARGV 'take' | 'keep' | 'give', token, for how many ms.  returns {'held'} {'other'} {'given'}
--   A place that nobody would ever leave, or not for long, was not taken here, and keeps no job from being done.
local function hold_job(keys, args)
  local key, what, token, ms = keys[1], args[1], args[2], tonumber(args[3])
  local holder = is_there(keys[2], key, 'string') and redis.call('GET', key)
  if what ~= 'take' and holder ~= token then return {'other'} end
  if what == 'give' then
    redis.call('DEL', key)
    return {'given'}
  end
  local left = holder and redis.call('PTTL', key) or 0
  if holder and holder ~= token and left >= 0 and left <= ms then return {'other'} end
  redis.call('SET', key, token, 'PX', ms)
  return {'held'}
end

-- forget_caller: forget who waits for a conversation, unless it has begun.
-- KEYS  conversation base, shard base   ARGV  cid
-- returns  {'forgotten'} {'begun'}
local function forget_caller(keys, args)
  if get(keys[1] .. ':meta', 'last_id') then return {'begun'} end
  redis.call('DEL', keys[1] .. ':caller')
  redis.call('ZREM', keys[2] .. ':awaited', args[1])
  return {'forgotten'}
end

-- write_note: add a note to a notebook that has room for it, or replace the one with its id.
-- KEYS notebook, shard base.  ARGV name of the notebook, id, note, how many there may be.  returns {'written'} {'full'}
local function write_note(keys, args)
  local notes, id = keys[1], args[2]
  if redis.call('HEXISTS', notes, id) == 0 and redis.call('HLEN', notes) >= tonumber(args[4]) then return {'full'} end
  redis.call('HSET', notes, id, args[3])
  redis.call('SADD', keys[2] .. ':notebooks', args[1])
  return {'written'}
end

-- lay_by: write a piece of a file that expires, unless it is whole already. What is not whole has an end.
-- KEYS the file.  ARGV ttl_ms, number of the piece, or 'size', its bytes, or how many there are.  returns {'kept'} {'there'}
local function lay_by(keys, args)
  if redis.call('HEXISTS', keys[1], 'size') == 1 then return {'there'} end
  redis.call('HSET', keys[1], args[2], args[3])
  redis.call('PEXPIRE', keys[1], args[1])
  return {'kept'}
end

-- claim_file: let a whole file stay.  KEYS the file.  returns {'claimed'} {'missing'}
local function claim_file(keys)
  if redis.call('HEXISTS', keys[1], 'size') == 0 then return {'missing'} end
  redis.call('PERSIST', keys[1])
  return {'claimed'}
end

redis.register_function('deck_told', told)
redis.register_function('deck_put_webhook', put_webhook)
redis.register_function('deck_plan_delivery', plan_delivery)
redis.register_function('deck_send_due', send_due)
redis.register_function('deck_take_delivery', take_delivery)
redis.register_function('deck_end_attempt', end_attempt)
redis.register_function('deck_redeliver', redeliver)
redis.register_function('deck_append', append)
redis.register_function('deck_claim', claim)
redis.register_function('deck_release', release)
redis.register_function('deck_due', due)
redis.register_function('deck_mark', mark)
redis.register_function('deck_snapshot', snapshot)
redis.register_function('deck_close', close)
redis.register_function('deck_begin_deletion', begin_deletion)
redis.register_function('deck_end_deletion', end_deletion)
redis.register_function('deck_requeue', requeue)
redis.register_function('deck_wake', wake)
redis.register_function('deck_dispatch', dispatch)
redis.register_function('deck_bind_node', bind_node)
redis.register_function('deck_claim_action', claim_action)
redis.register_function('deck_mark_action', mark_action)
redis.register_function('deck_register', register)
redis.register_function('deck_tick', tick)
redis.register_function('deck_leave', leave)
redis.register_function('deck_move_schedule', move_schedule)
redis.register_function('deck_put_schedule', put_schedule)
redis.register_function('deck_hold_job', hold_job)
redis.register_function('deck_now', now)
redis.register_function('deck_keep_kind', keep_kind)
redis.register_function('deck_admit', admit)
redis.register_function('deck_set_tenants', set_tenants)
redis.register_function('deck_forget_caller', forget_caller)
redis.register_function('deck_write_note', write_note)
redis.register_function('deck_lay_by', lay_by)
redis.register_function('deck_claim_file', claim_file)
