package spiffe

import (
	"strings"
	"testing"
)

func TestCheckSocket(t *testing.T) {
	for socket, want := range map[string]string{
		"unix:///run/spire/agent.sock": "",
		"unix:/run/spire/agent.sock":   "",
		"tcp://127.0.0.1:8081":         "",
		"tcp://[::1]:8081":             "",
		"":                             "no socket",
		"/run/spire/agent.sock":        "want unix:///PATH",
		"unix://run/agent.sock":        "absolute path",
		"unix:agent.sock":              "absolute path",
		"unix:///a?b":                  "no meaning",
		"tcp://agent:8081":             "IP address",
		"tcp://127.0.0.1":              "IP address",
		"tcp://127.0.0.1:0":            "IP address",
		"tcp://127.0.0.1:80/x":         "IP address",
		"tcp://u@127.0.0.1:80":         "no meaning",
		"http://127.0.0.1:80":          "want unix:///PATH",
		"%":                            "not a URI",
	} {
		err := CheckSocket(socket)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: got error %v, want %q", socket, err, want)
		}
	}
}
