//go:build !nokube

package command

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"culvert.dev/internal/kube"
)

// kubeStatus prints what a gateway knows of Kubernetes.
func kubeStatus(w io.Writer, s *runningStatus, asJSON bool) error {
	var err error
	switch {
	case s.Kubernetes == nil:
		return &cliError{err: fmt.Errorf("the gateway has no Kubernetes configuration"), hint: "add a kubernetes section to its file", code: exitFailed}
	case asJSON:
		err = writeJSON(w, s.Kubernetes)
	default:
		err = printKube(w, s.Kubernetes)
	}
	if err == nil && !s.Ready {
		return errSilent
	}
	return err
}

// printKube prints s: what is short first, and then the Gateways and what is
// refused.
func printKube(w io.Writer, s *kube.Status) error {
	var b strings.Builder
	line := func(what, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s %s\n", what+":", printable(fmt.Sprintf(format, args...)))
	}
	for _, c := range s.Clusters {
		line("cluster", "%s, %s: %s found, %d exposed, %d exported, %s", c.Cluster, touch(c.Known, c.Lost, c.Error),
			plural(c.Services, "service"), c.Exposed, c.Exported, plural(c.Problems, "problem"))
	}
	if api := s.GatewayAPI; api != nil {
		line("gateways", "%s: %s, %s", touch(api.Known, api.Lost, api.Error), plural(len(api.Gateways), "Gateway"), plural(api.Routes, "route"))
		if len(api.Kinds) > 0 {
			line("kinds", "%s", kindsText(api.Kinds))
		}
	}
	switch l := s.Lease; {
	case l == nil:
		line("writes", "this process never does")
	case l.Error != "":
		line("writes", "not this replica, %s: %s (lease %s)", l.Self, l.Error, l.Name)
	case l.Leads:
		line("writes", "this replica, %s, by the lease %s", l.Self, l.Name)
	case l.Holder == "":
		line("writes", "unknown, by the lease %s; this replica is %s", l.Name, l.Self)
	default:
		line("writes", "%s, by the lease %s; this replica is %s", l.Holder, l.Name, l.Self)
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return err
	}
	if err := printGateways(w, s); err != nil {
		return err
	}
	return printRefusals(w, s)
}

// kindsText says by which versions kinds are read, and which are not.
func kindsText(kinds map[string]string) string {
	by := map[string][]string{}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		by[kinds[kind]] = append(by[kinds[kind]], kind)
	}
	texts := []string{}
	for _, version := range slices.Sorted(maps.Keys(by)) {
		names := strings.Join(by[version], ", ")
		switch version {
		case "none":
			texts = append(texts, "not served by the API server: "+names)
		case "unread":
			texts = append(texts, "not read yet, or no permission: "+names)
		default:
			texts = append(texts, version+": "+names)
		}
	}
	return strings.Join(texts, "; ")
}

// touch says how old what is known is.
func touch(known bool, lost *time.Time, why string) string {
	switch {
	case lost != nil && !known:
		return fmt.Sprintf("never seen, lost for %s (%s)", humanSeconds(time.Since(*lost).Seconds()), why)
	case lost != nil:
		return fmt.Sprintf("%s old: it does not answer (%s)", humanSeconds(time.Since(*lost).Seconds()), why)
	case !known:
		return "not seen yet"
	}
	return "in touch"
}

// printGateways prints a row for each listener.
func printGateways(w io.Writer, s *kube.Status) error {
	if s.GatewayAPI == nil || len(s.GatewayAPI.Gateways) == 0 {
		return nil
	}
	rows := [][]string{{"GATEWAY", "ADDRESS", "LISTENER", "PORT", "STATE", "ROUTES", "WHY"}}
	for _, g := range s.GatewayAPI.Gateways {
		address := strings.Join(g.Addresses, ",")
		if address == "" {
			address = "none"
		}
		if len(g.Listeners) == 0 {
			rows = append(rows, []string{printable(g.Name), printable(address), "none", "", "", "", printable(g.Why)})
		}
		for _, l := range g.Listeners {
			name, why := l.Name, l.Why
			if l.Set != "" {
				name = l.Set + ":" + name
			}
			if why == "" {
				why = g.Why
			}
			rows = append(rows, []string{
				printable(g.Name), printable(address), printable(name), strconv.Itoa(l.Port) + "/" + l.Protocol, l.State, strconv.Itoa(l.Routes), printable(why),
			})
		}
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return writeTable(w, rows, 0)
}

// printRefusals prints what is refused, and how much more there is.
func printRefusals(w io.Writer, s *kube.Status) error {
	rows := [][]string{{"REFUSED", "WHY"}}
	more := 0
	for _, c := range s.Clusters {
		more += c.Problems
		for _, r := range c.Refusals {
			object, why, _ := strings.Cut(r, ": ")
			rows = append(rows, []string{printable(object), printable(why)})
		}
		more -= min(c.Problems, len(c.Refusals))
	}
	if api := s.GatewayAPI; api != nil {
		more += api.More
		for _, r := range api.Refusals {
			why := r.Reason + ": " + r.Message
			if r.Others > 0 {
				kind, _, _ := strings.Cut(r.Object, " ")
				why += fmt.Sprintf(" (so for %d more %ss of the namespace)", r.Others, kind)
			}
			rows = append(rows, []string{printable(r.Object), printable(why)})
		}
	}
	if len(rows) == 1 {
		return nil
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	if err := writeTable(w, rows, 0); err != nil || more == 0 {
		return err
	}
	_, err := fmt.Fprintf(w, "and %d more\n", more)
	return err
}
