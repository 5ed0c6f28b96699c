package connect

import (
	"context"
	"io"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

// readList reads a list of names and values.
func readList(pairs ...string) *ListReader {
	r := new(ListReader)
	for i := 0; i < len(pairs); i += 2 {
		r.Add(pairs[i], pairs[i+1])
	}
	return r
}

func TestListReader(t *testing.T) {
	for _, c := range []struct {
		name  string
		list  []string
		wrong string // of a request; "" for nothing
		large bool
	}{
		{"CONNECT", []string{":method", "CONNECT", ":authority", "svc:1", "via", "2 a"}, "", false},
		{"GET", []string{":method", "GET", ":scheme", "https", ":path", "/", ":authority", "svc"}, "", false},
		{"extended CONNECT", []string{":method", "CONNECT", ":protocol", "websocket", ":scheme", "https", ":path", "/", ":authority", "svc"}, "", false},
		{"extended GET", []string{":method", "GET", ":protocol", "websocket", ":scheme", "https", ":path", "/", ":authority", "svc"}, "extended CONNECT", false},
		{"empty protocol", []string{":method", "CONNECT", ":protocol", "", ":scheme", "https", ":path", "/", ":authority", "svc"}, "extended CONNECT", false},
		{"nothing", nil, "without :method", false},
		{"no authority", []string{":method", "CONNECT"}, "without :authority", false},
		{"CONNECT with scheme", []string{":method", "CONNECT", ":authority", "svc:1", ":scheme", "https"}, "with :scheme", false},
		{"GET without path", []string{":method", "GET", ":scheme", "https", ":path", ""}, "without :scheme", false},
		{"status", []string{":status", "200"}, "with :status", false},
		{"status of two digits", []string{":status", "20"}, ":status that is none", false},
		{"twice", []string{":method", "CONNECT", ":method", "CONNECT"}, "twice", false},
		{"late", []string{"a", "b", ":method", "CONNECT"}, "after others", false},
		{"unknown", []string{":x", ""}, "unknown pseudo", false},
		{"capital", []string{"A", "b"}, "field name", false},
		{"no name", []string{"", "b"}, "field name", false},
		{"CR", []string{"a", "b\r"}, "field value", false},
		{"NUL in a pseudo-header field", []string{":authority", "a\x00"}, "field value", false},
		{"blank at the end", []string{"a", "b "}, "field value", false},
		{"connection", []string{"connection", "close"}, "HTTP/1.1", false},
		{"te", []string{"te", "gzip"}, "te field", false},
		{"te: trailers", []string{":method", "CONNECT", ":authority", "svc:1", "te", "trailers"}, "", false},
		{"as many fields as may be", append([]string{":method", "CONNECT", ":authority", "svc:1"}, strings.Split(strings.Repeat("a,b,", MaxListFields-1)+"a,b", ",")...), "", false},
		{"one more", strings.Split(strings.Repeat("a,b,", MaxListFields)+"a,b", ","), "", true},
		{"as many bytes as may be", []string{":method", "CONNECT", ":authority", "svc:1", "a", strings.Repeat("x", MaxList-3*listOverhead-len(":methodCONNECT:authoritysvc:1a"))}, "", false},
		{"one more byte", []string{":method", "CONNECT", ":authority", "svc:1", "a", strings.Repeat("x", MaxList-3*listOverhead-len(":methodCONNECT:authoritysvc:1"))}, "", true},
	} {
		r := readList(c.list...)
		r.Request()
		if !strings.Contains(r.Wrong(), c.wrong) || (r.Wrong() == "") != (c.wrong == "") || r.Large() != c.large {
			t.Errorf("%s: wrong %q, large %v; want %q, %v", c.name, r.Wrong(), r.Large(), c.wrong, c.large)
		}
	}
	if !readList(":status", "200", "a", "b").IsAnswer() || readList(":status", "200", ":path", "/").IsAnswer() || readList("a", "b").IsAnswer() {
		t.Error("an answer is a list with :status and no other pseudo-header field")
	}
	if !readList("a", "b").IsTrailers() || readList("A", "b").IsTrailers() || readList(":status", "200").IsTrailers() {
		t.Error("trailers are a list without pseudo-header fields")
	}
}

// TestAskerIsUnderstood: what one side says the other one reads.
func TestAskerIsUnderstood(t *testing.T) {
	a := Asker{Version: "3", Via: "me", Authorization: BearerCredentials("t"), Header: func(context.Context, string) (Fields, error) {
		return Fields{{"X-More", "1"}}, nil
	}}
	pseudo, fields, err := a.Lists(WithVia(t.Context(), []string{"before"}), &HeaderList{Authority: "svc:1"})
	if err != nil {
		t.Fatal(err)
	}
	r := new(ListReader)
	for _, f := range append(pseudo, fields...) {
		r.Add(f.Name, f.Value)
	}
	r.Request()
	if r.Full() {
		t.Fatalf("the list is wrong: %q", r.Wrong())
	}
	for name, want := range map[string]string{"via": "3 before, 3 me", "proxy-authorization": "Bearer t", "x-more": "1"} {
		if got, n := r.List.Fields.Get(name); got != want || n != 1 {
			t.Errorf("%s: got %q (%d), want %q", name, got, n, want)
		}
	}
	req := new(tunnel.Request)
	if _, _, err := (&Protocol{Via: "other"}).AdmitList(t.Context(), req, &r.List); err != nil || req.Target() != "svc:1" {
		t.Errorf("got target %q and %v", req.Target(), err)
	}
	_, _, err = (&Protocol{Via: "before"}).AdmitList(t.Context(), req, &r.List)
	if tunnel.ReasonOf(err) != tunnel.Loop {
		t.Errorf("got %v, want a loop", err)
	}
	for _, list := range []HeaderList{
		{Authority: "svc:1\r\n"},
		{Authority: "svc:1", Fields: Fields{{"a", "b\n"}}},
		{Authority: "svc:1", Fields: Fields{{"Host", "b"}}},
	} {
		if _, _, err := a.Lists(t.Context(), &list); err == nil {
			t.Errorf("%+v can be sent", list)
		}
	}
}

func TestRefused(t *testing.T) {
	answer := &HeaderList{Status: 403, Fields: Fields{{"proxy-status", `gw; error=http_request_denied; details="no-route"`}}}
	err := Refused("gw:1", "svc:1", answer, io.LimitReader(strings.NewReader("one line\nand more"+strings.Repeat("x", 1000)), 1000))
	if err.Reason != tunnel.NoRoute || !strings.HasSuffix(err.Error(), `: "one line"`) {
		t.Errorf("got %v (%s)", err, err.Reason)
	}
}
