// Drives the Go client from a test. The interface shared by all drivers is in clients.py.
//
//	send    NAMESRV TOPIC GROUP sync|async|oneway|batch|orderly      messages on standard input
//	consume NAMESRV TOPIC GROUP EXPRESSION push|orderly|replying|failing:MAX:LEVEL PROPERTIES   until end of input
//	flow     NAMESRV TOPIC GROUP TIMEOUT_MS sync PAUSE_MS            messages on standard input
//	transact NAMESRV TOPIC GROUP SECONDS                             as in Driver.java
//	request  NAMESRV TOPIC GROUP                                     as in Driver.java
//
// A mode may carry options, see clients.py; of this client alone: trace.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

type asked struct {
	Body       []byte            `json:"body"`
	Tags       *string           `json:"tags"`
	Keys       *string           `json:"keys"`
	Properties map[string]string `json:"properties"`
	Shard      *int              `json:"shard"`
	Delay      *int              `json:"delay"`
}

type line map[string]any

var (
	output sync.Mutex
	lines  = json.NewEncoder(os.Stdout)
)

func main() {
	if len(os.Args) < 5 {
		fail(fmt.Errorf("too few words"))
	}
	resolver := primitive.NewPassthroughResolver(strings.Split(os.Args[2], ";"))
	switch os.Args[1] {
	case "send":
		send(resolver, os.Args[3], os.Args[4], os.Args[5])
	case "consume":
		consume(resolver, os.Args[3], os.Args[4], os.Args[5], os.Args[6])
	case "flow":
		flow(resolver, os.Args[3], os.Args[4], os.Args[5], os.Args[6], os.Args[7])
	case "transact":
		transact(resolver, os.Args[3], os.Args[4], os.Args[5])
	case "request":
		request(resolver, os.Args[3], os.Args[4])
	default:
		fail(fmt.Errorf("unknown verb %s", os.Args[1]))
	}
}

// shards sends a message to the queue its "shard" names, so that order can be checked per queue.
type shards struct{ of map[*primitive.Message]int }

func (s shards) Select(m *primitive.Message, queues []*primitive.MessageQueue, _ string) *primitive.MessageQueue {
	return queues[s.of[m]%len(queues)]
}

func send(resolver primitive.NsResolver, topic, group, mode string) {
	mode, with := splitMode(mode)
	selector := shards{of: map[*primitive.Message]int{}}
	messages := readMessages(topic, selector.of)
	options := []producer.Option{
		producer.WithNsResolver(resolver),
		producer.WithGroupName(group),
		producer.WithSendMsgTimeout(10 * time.Second),
	}
	if name, ok := with["namespace"]; ok {
		options = append(options, producer.WithNamespace(name))
	}
	if _, ok := with["trace"]; ok {
		options = append(options, producer.WithTrace(traceOf(resolver, group)))
	}
	if mode == "orderly" {
		options = append(options, producer.WithQueueSelector(selector))
	}
	p, err := rocketmq.NewProducer(options...)
	check(err)
	check(p.Start())
	ctx := context.Background()
	var answered sync.WaitGroup
	switch mode {
	case "batch":
		result, err := p.SendSync(ctx, messages...)
		check(err)
		// The client reports the ids that the broker gave, but not those it made itself.
		offsetIDs := strings.Split(result.OffsetMsgID, ",")
		for i := range messages {
			one := sent(i, result)
			one["msg_id"], one["offset_msg_id"] = nil, offsetIDs[i]
			one["queue_offset"] = result.QueueOffset + int64(i)
			write(one)
		}
	case "sync", "orderly":
		for i, message := range messages {
			result, err := p.SendSync(ctx, message)
			check(err)
			write(sent(i, result))
		}
	case "oneway":
		for i, message := range messages {
			check(p.SendOneWay(ctx, message))
			write(line{"event": "sent", "index": i})
		}
	case "async":
		for i, message := range messages {
			answered.Add(1)
			check(p.SendAsync(ctx, func(_ context.Context, result *primitive.SendResult, err error) {
				defer answered.Done()
				if err != nil {
					write(line{"event": "failed", "index": i, "error": err.Error()})
					return
				}
				write(sent(i, result))
			}, message))
		}
	default:
		fail(fmt.Errorf("unknown mode %s", mode))
	}
	answered.Wait()
	if _, ok := with["trace"]; ok {
		time.Sleep(time.Second) // The client drops the records it has not sent when it is shut down.
	}
	check(p.Shutdown())
}

// splitMode cuts MODE+NAME+NAME=VALUE into the mode and its options.
func splitMode(text string) (string, map[string]string) {
	parts := strings.Split(text, "+")
	with := map[string]string{}
	for _, part := range parts[1:] {
		name, value, _ := strings.Cut(part, "=")
		with[name] = value
	}
	return parts[0], with
}

func traceOf(resolver primitive.NsResolver, group string) *primitive.TraceConfig {
	return &primitive.TraceConfig{GroupName: group, Access: primitive.Local, Resolver: resolver}
}

func readMessages(topic string, shardOf map[*primitive.Message]int) []*primitive.Message {
	var messages []*primitive.Message
	reader := json.NewDecoder(bufio.NewReader(os.Stdin))
	for {
		var one asked
		err := reader.Decode(&one)
		if err == io.EOF {
			return messages
		}
		check(err)
		message := messageOf(topic, one)
		if one.Shard != nil {
			shardOf[message] = *one.Shard
		}
		messages = append(messages, message)
	}
}

func messageOf(topic string, one asked) *primitive.Message {
	message := primitive.NewMessage(topic, one.Body)
	if one.Tags != nil {
		message.WithTag(*one.Tags)
	}
	if one.Keys != nil {
		message.WithKeys(strings.Split(*one.Keys, " "))
	}
	if one.Delay != nil {
		message.WithDelayTimeLevel(*one.Delay)
	}
	for key, value := range one.Properties {
		message.WithProperty(key, value)
	}
	return message
}

func sent(index int, result *primitive.SendResult) line {
	status := map[primitive.SendStatus]string{primitive.SendOK: "SEND_OK"}[result.Status]
	if status == "" {
		status = strconv.Itoa(int(result.Status))
	}
	return line{
		"event": "sent", "index": index, "status": status,
		"msg_id": result.MsgID, "offset_msg_id": result.OffsetMsgID,
		"broker":   result.MessageQueue.BrokerName,
		"queue_id": result.MessageQueue.QueueId, "queue_offset": result.QueueOffset,
	}
}

func consume(resolver primitive.NsResolver, topic, group, expression, mode string) {
	mode, with := splitMode(mode)
	retries, level := int32(-1), 0
	failing := strings.HasPrefix(mode, "failing:")
	if failing {
		_, err := fmt.Sscanf(mode, "failing:%d:%d", &retries, &level)
		check(err)
	}
	options := []consumer.Option{
		consumer.WithNsResolver(resolver),
		consumer.WithGroupName(group),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(mode == "orderly"),
		consumer.WithMaxReconsumeTimes(retries),
	}
	for name, value := range with {
		switch name {
		case "broadcast":
			options = append(options, consumer.WithConsumerModel(consumer.BroadCasting))
		case "from":
			if value == "last" {
				options = append(options, consumer.WithConsumeFromWhere(consumer.ConsumeFromLastOffset))
			} else if value != "first" {
				options = append(options, consumer.WithConsumeFromWhere(consumer.ConsumeFromTimestamp),
					consumer.WithConsumeTimestamp(value))
			}
		case "instance":
			options = append(options, consumer.WithInstance(value))
		case "namespace":
			options = append(options, consumer.WithNamespace(value))
		case "trace":
			options = append(options, consumer.WithTrace(traceOf(resolver, group)))
		default:
			fail(fmt.Errorf("unknown option %s", name))
		}
	}
	c, err := rocketmq.NewPushConsumer(options...)
	check(err)
	reply := func(*primitive.MessageExt) {}
	if mode == "replying" {
		reply = replier(resolver, group)
	}
	check(c.Subscribe(topic, selectorOf(expression),
		func(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			for _, message := range messages {
				received(message)
				reply(message)
			}
			if failing {
				if concurrent, ok := primitive.GetConcurrentlyCtx(ctx); ok {
					concurrent.DelayLevelWhenNextConsume = level
				}
				return consumer.ConsumeRetryLater, nil
			}
			return consumer.ConsumeSuccess, nil
		}))
	check(c.Start())
	write(line{"event": "started"})
	_, _ = io.Copy(io.Discard, os.Stdin)
	check(c.Shutdown())
	write(line{"event": "stopped"})
}

func received(m *primitive.MessageExt) {
	write(line{
		"event": "message", "at_ms": time.Now().UnixMilli(),
		"msg_id": m.MsgId, "offset_msg_id": m.OffsetMsgId,
		"topic": m.Topic, "queue_id": m.Queue.QueueId, "queue_offset": m.QueueOffset,
		"born_ms": m.BornTimestamp, "store_ms": m.StoreTimestamp, "sys_flag": m.SysFlag,
		"reconsume_times": m.ReconsumeTimes,
		"tags":            orNull(m.GetTags()), "keys": orNull(m.GetKeys()),
		"properties": m.GetProperties(), "body": m.Body, "broker": m.Queue.BrokerName,
	})
}

func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}

func write(one line) {
	output.Lock()
	defer output.Unlock()
	check(lines.Encode(one))
}

func check(err error) {
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "driver:", err)
	os.Exit(1)
}
