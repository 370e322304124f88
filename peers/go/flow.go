package main

import (
	"bufio"
	"context"
	"encoding/json"
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

// flow sends each line of the input when it is read, and reports failures instead of ending.
func flow(resolver primitive.NsResolver, topic, group, timeoutMs, mode, pauseMs string) {
	timeout, err := strconv.Atoi(timeoutMs)
	check(err)
	pause, err := strconv.Atoi(pauseMs)
	check(err)
	p, err := rocketmq.NewProducer(
		producer.WithNsResolver(resolver),
		producer.WithGroupName(group),
		producer.WithSendMsgTimeout(time.Duration(timeout)*time.Millisecond),
		producer.WithRetry(2),
	)
	check(err)
	check(p.Start())
	write(line{"event": "started"})
	reader := json.NewDecoder(bufio.NewReader(os.Stdin))
	for index := 0; ; index++ {
		var one asked
		err := reader.Decode(&one)
		if err == io.EOF {
			break
		}
		check(err)
		before := time.Now().UnixMilli()
		result, err := p.SendSync(context.Background(), messageOf(topic, one))
		answer := line{"event": "failed", "index": index}
		if err == nil {
			answer = sent(index, result)
		} else {
			answer["error"] = err.Error()
		}
		answer["body"], answer["before_ms"], answer["at_ms"] = one.Body, before, time.Now().UnixMilli()
		write(answer)
		time.Sleep(time.Duration(pause) * time.Millisecond)
	}
	check(p.Shutdown())
	write(line{"event": "stopped"})
}

// decisions answers as the property outcome of a message says.
type decisions struct{ asked *sync.WaitGroup }

func (d decisions) ExecuteLocalTransaction(m *primitive.Message) primitive.LocalTransactionState {
	return state(m.GetProperty("outcome"))
}

func (d decisions) CheckLocalTransaction(m *primitive.MessageExt) primitive.LocalTransactionState {
	write(line{
		"event": "checked", "topic": m.Topic, "transaction_id": m.TransactionId,
		"properties": m.GetProperties(), "body": m.Body,
	})
	d.asked.Done()
	return state(strings.TrimPrefix(m.GetProperty("outcome"), "later:"))
}

func state(outcome string) primitive.LocalTransactionState {
	switch outcome {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	default:
		return primitive.UnknowState
	}
}

func transact(resolver primitive.NsResolver, topic, group, seconds string) {
	wait, err := strconv.Atoi(seconds)
	check(err)
	messages := readMessages(topic, map[*primitive.Message]int{})
	var undecided sync.WaitGroup
	for _, message := range messages {
		if strings.HasPrefix(message.GetProperty("outcome"), "later:") {
			undecided.Add(1)
		}
	}
	p, err := rocketmq.NewTransactionProducer(
		decisions{&undecided},
		producer.WithNsResolver(resolver),
		producer.WithGroupName(group),
		producer.WithSendMsgTimeout(10*time.Second),
	)
	check(err)
	check(p.Start())
	for i, message := range messages {
		result, err := p.SendMessageInTransaction(context.Background(), message)
		check(err)
		one := sent(i, result.SendResult)
		one["state"] = map[primitive.LocalTransactionState]string{
			primitive.CommitMessageState:   "COMMIT_MESSAGE",
			primitive.RollbackMessageState: "ROLLBACK_MESSAGE",
			primitive.UnknowState:          "UNKNOW",
		}[result.State]
		write(one)
	}
	done := make(chan struct{})
	go func() {
		undecided.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Duration(wait) * time.Second):
	}
	// The answers are one-way requests of another routine.
	time.Sleep(500 * time.Millisecond)
	check(p.Shutdown())
}

// request waits for a reply to each message.
func request(resolver primitive.NsResolver, topic, group string) {
	messages := readMessages(topic, map[*primitive.Message]int{})
	p, err := rocketmq.NewProducer(producer.WithNsResolver(resolver), producer.WithGroupName(group))
	check(err)
	check(p.Start())
	// A broker can push a reply only to a client it has heard from. This one makes itself known a
	// second after its start, and only to brokers it has sent to before.
	_, err = p.SendSync(context.Background(), primitive.NewMessage("Hello_"+topic, []byte("hello")))
	check(err)
	time.Sleep(2 * time.Second)
	for _, message := range messages {
		reply, err := p.Request(context.Background(), 20*time.Second, message)
		check(err)
		write(line{"event": "reply", "properties": reply.GetProperties(), "body": reply.Body})
	}
	check(p.Shutdown())
}

// replier returns what answers a request: "re: " and the body of the question.
func replier(resolver primitive.NsResolver, group string) func(*primitive.MessageExt) {
	p, err := rocketmq.NewProducer(producer.WithNsResolver(resolver), producer.WithGroupName("r_"+group))
	check(err)
	check(p.Start())
	return func(m *primitive.MessageExt) {
		reply, err := consumer.CreateReplyMessage(m, nil)
		check(err)
		// That function takes the body for properties and leaves the reply without one.
		reply.Body = append([]byte("re: "), m.Body...)
		_, err = p.SendSync(context.Background(), reply)
		check(err)
	}
}

// selectorOf takes tags, or an SQL92 condition behind the word sql:.
func selectorOf(expression string) consumer.MessageSelector {
	if condition, ok := strings.CutPrefix(expression, "sql:"); ok {
		return consumer.MessageSelector{Type: consumer.SQL92, Expression: condition}
	}
	return consumer.MessageSelector{Type: consumer.TAG, Expression: expression}
}
