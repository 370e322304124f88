'use strict';

// Drives the Node client from a test. The interface shared by all drivers is in clients.py.
//
//   send    NAMESRV TOPIC GROUP sync|async                    messages on standard input
//   consume NAMESRV TOPIC GROUP EXPRESSION push PROPERTIES    until end of input
//
// The client has no one-way, batch or orderly mode. Of the options of a mode (see clients.py) it
// takes broadcast, from=last, from=first, instance and namespace.

const { Consumer, Message, Producer } = require('ali-ons');

const [ verb, namesrv, topic, group, ...rest ] = process.argv.slice(2);

const logger = {
  debug() {},
  info() {},
  warn(...words) { console.error(...words); },
  error(...words) { console.error(...words); },
};
const common = {
  nameSrv: namesrv,
  logger,
  // Demanded by the client, but only asked when no name server address is given.
  httpclient: { async request() { throw new Error('no address server here'); } },
};

function write(line) {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

async function input() {
  const parts = [];
  for await (const part of process.stdin) parts.push(part);
  return Buffer.concat(parts).toString('utf8');
}

function message(asked) {
  const made = new Message(topic, asked.tags || '', Buffer.from(asked.body, 'base64'));
  // An unset tag would otherwise be sent as the text "null" or as an empty property.
  if (!asked.tags) delete made.properties.TAGS;
  if (asked.delay) made.delayTimeLevel = asked.delay;
  if (asked.keys) made.keys = asked.keys.split(' ');
  Object.assign(made.properties, asked.properties || {});
  return made;
}

function sent(index, result) {
  write({
    event: 'sent',
    index,
    status: result.sendStatus,
    msg_id: result.msgId,
    offset_msg_id: result.msgId, // it makes no id of its own
    queue_id: Number(result.messageQueue.queueId),
    queue_offset: result.queueOffset,
  });
}

function options(mode) {
  const [ name, ...words ] = mode.split('+');
  return { name, ...Object.fromEntries(words.map(word => [ ...word.split('='), true ])) };
}

async function send(given) {
  const { name: mode, namespace } = options(given);
  const asked = (await input()).split('\n').filter(line => line).map(line => JSON.parse(line));
  const producer = new Producer({ ...common, producerGroup: group, ...(namespace && { namespace }) });
  await producer.ready();
  if (mode === 'sync') {
    for (const [ index, one ] of asked.entries()) sent(index, await producer.send(message(one)));
  } else if (mode === 'async') {
    await Promise.all(asked.map(async (one, index) => sent(index, await producer.send(message(one)))));
  } else {
    throw new Error(`unknown mode ${mode}`);
  }
  await producer.close();
}

async function consume(expression, given) {
  const { name: mode, broadcast, from, instance, namespace } = options(given);
  const consumer = new Consumer({
    ...common,
    consumerGroup: group,
    consumeFromWhere: from === 'last' ? 'CONSUME_FROM_LAST_OFFSET' : 'CONSUME_FROM_FIRST_OFFSET',
    isBroadcast: Boolean(broadcast),
    persistent: Boolean(broadcast), // keeps its place in a file
    ...(instance && { instanceName: instance }),
    ...(namespace && { namespace }),
  });
  consumer.on('error', error => console.error(error));
  consumer.subscribe(topic, expression, async got => {
    write({
      event: 'message',
      at_ms: Date.now(),
      msg_id: got.properties.UNIQ_KEY || got.msgId,
      offset_msg_id: got.msgId,
      queue_id: got.queueId,
      queue_offset: got.queueOffset,
      born_ms: got.bornTimestamp,
      store_ms: got.storeTimestamp,
      sys_flag: got.sysFlag,
      reconsume_times: got.reconsumeTimes,
      tags: got.tags || null,
      keys: got.keys || null,
      properties: got.properties,
      body: got.body.toString('base64'),
    });
    if (mode.startsWith('failing:')) throw new Error('to be tried again');
  });
  await consumer.ready();
  write({ event: 'started' });
  await input();
  await consumer.close();
  write({ event: 'stopped' });
}

async function main() {
  if (verb === 'send') await send(rest[0]);
  else if (verb === 'consume') await consume(rest[0], rest[1]);
  else throw new Error(`unknown verb ${verb}`);
  process.exit(0);
}

main().catch(error => {
  console.error(error);
  process.exit(1);
});
