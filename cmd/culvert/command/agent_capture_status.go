package command

import (
	"fmt"
	"net/netip"
	"strings"

	"culvert.dev/internal/capture"
)

// An agentCaptureStatus is what an agent captures.
type agentCaptureStatus struct {
	Table   string   `json:"table"`          // of nftables
	All     bool     `json:"all,omitempty"`  // every destination
	VIPs    *int     `json:"vips,omitempty"` // how many addresses; nil where they are not captured
	CIDRs   []string `json:"cidrs,omitempty"`
	UIDs    []uint32 `json:"uids,omitempty"`
	Cgroups []string `json:"cgroups,omitempty"`
	Except  []string `json:"except,omitempty"`
	Off     bool     `json:"off,omitempty"` // nothing is captured
	Problem string   `json:"problem,omitempty"`
}

// status returns what is captured; nil where that is nothing, as it should be.
func (a *agentCapture) status() *agentCaptureStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	w := a.inForce
	if w == nil || !w.on && a.problem == "" {
		return nil
	}
	r := &w.rules
	s := &agentCaptureStatus{Table: capture.TableName(r.Name), All: r.All, CIDRs: texts(w.cidrs), UIDs: r.UIDs, Cgroups: r.Cgroups, Except: texts(r.Except), Off: !w.on, Problem: a.problem}
	if r.VIPs {
		n := a.vips
		s.VIPs = &n
	}
	return s
}

// texts returns ranges as text.
func texts(ranges []netip.Prefix) (all []string) {
	for _, r := range ranges {
		all = append(all, r.String())
	}
	return all
}

// String says what is captured, for people.
func (s *agentCaptureStatus) String() string {
	if s.Off {
		return "nothing: " + s.Problem
	}
	var to []string
	if s.All {
		to = append(to, "every address")
	}
	if s.VIPs != nil {
		to = append(to, plural(*s.VIPs, "virtual IP"))
	}
	to = append(to, s.CIDRs...)
	if len(s.Except) > 0 {
		to = append(to, "but "+strings.Join(s.Except, ", "))
	}
	of := "every program"
	if n := len(s.UIDs) + len(s.Cgroups); n > 0 {
		var who []string
		for _, uid := range s.UIDs {
			who = append(who, fmt.Sprintf("uid %d", uid))
		}
		for _, path := range s.Cgroups {
			who = append(who, "cgroup "+path)
		}
		of = strings.Join(who, ", ")
	}
	text := fmt.Sprintf("%s, of %s (table inet %s)", strings.Join(to, ", "), of, s.Table)
	if s.Problem != "" {
		text += ": " + s.Problem
	}
	return text
}

// report keeps a problem for the status, and logs a new one.
func (a *agentCapture) report(err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	a.mu.Lock()
	before := a.problem
	a.problem = problem
	a.mu.Unlock()
	if problem != "" && problem != before {
		a.log.Error("cannot change the rules of capture; they are as before, and are tried again", "err", err, "retry_in", captureInterval)
	}
}

// metrics adds gauges.
func (a *agentCapture) metrics(add addGauges) {
	add("culvert_capture_problem", "1 where the rules of agent.capture cannot be changed, and the last ones are kept.", nil, func(yield func([]string, float64)) {
		a.mu.Lock()
		problem := a.problem != ""
		a.mu.Unlock()
		v := 0.0
		if problem {
			v = 1
		}
		yield(nil, v)
	})
}
