package ssh

import (
	"errors"
	"io"
	"strings"

	"golang.org/x/crypto/ssh"

	"culvert.dev/connect/internal/mux"
)

// console serves a channel of the type session: it tells people what this is, and waits.
func (s *session) console(nc ssh.NewChannel) {
	defer s.closed()
	ch, requests, err := nc.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	shell, terminal := false, false
	for r := range requests {
		if !s.spend(mux.CostFrame) {
			return
		}
		ok := false
		switch r.Type {
		case "pty-req":
			ok, terminal = !shell, true
		case "shell":
			if !shell {
				ok, shell = true, true
			}
		}
		_ = r.Reply(ok, nil)
		if ok && r.Type == "shell" {
			s.running.Go(func() {
				defer s.recovered()
				s.converse(ch, terminal)
			})
		}
	}
}

// converse says what this is, and waits for the client to leave. In a terminal nobody but
// the server sees Ctrl-C.
func (s *session) converse(ch ssh.Channel, terminal bool) {
	text := "You are " + s.peer().ID + ". There is no shell here: use ssh -N with -L, -D, -W or -J.\n"
	if terminal {
		text = strings.ReplaceAll(text, "\n", "\r\n")
	}
	if _, err := io.WriteString(ch, text); err != nil {
		return
	}
	b := make([]byte, 64)
	for {
		n, err := ch.Read(b)
		if terminal && strings.ContainsAny(string(b[:n]), "\x03\x04") {
			break
		}
		if errors.Is(err, io.EOF) {
			if terminal {
				break
			}
			return // the channel stays until the client closes it
		}
		if err != nil {
			return
		}
	}
	_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{0}))
	_ = ch.Close()
}
