package policy_test

import (
	"encoding/json"
	"testing"

	"culvert.dev/policy"
	"culvert.dev/policy/policytest"
)

// check compares the decision of the compiled policies with the naive one.
func check(t *testing.T, w *policytest.World) {
	t.Helper()
	set := policy.NewCompiler(w.Policies, policytest.NetworkOf).Set(&w.Target)
	got := set.Decide(w.Request, w.Port, w.Verb)
	d, dry := got, got
	if d.DryRun != nil {
		dry = *d.DryRun
	}
	d.DryRun = nil
	if want, wantDry := w.Decide(false), w.Decide(true); d != want || dry != wantDry {
		text, _ := json.MarshalIndent(w.Policies, "", " ")
		t.Fatalf("policies %s\ntarget %+v\nrequest %+v\nport %d %v\ngot %+v (dry run %+v), want %+v (%+v)", text, w.Target, w.Request, w.Port, w.Verb, d, dry, want, wantDry)
	}
	explained, steps := set.Explain(w.Request, w.Port, w.Verb, false)
	if explained.DryRun = nil; explained != d {
		t.Fatalf("got %+v from Explain, want %+v of Decide", explained, d)
	}
	if set != nil && d.Step != policy.Undecided {
		if r := steps[d.Step-1]; r.Skipped != "" || len(r.Policies) == 0 || (r.Match != nil) != (d.Rule >= 0) || r.Match != nil && (r.Match.Name != d.Policy || r.Rule != d.Rule) {
			t.Fatalf("got %+v for the step %q, want what has decided: %+v", r, d.Step, d)
		}
	}
}

func TestCompiledAgreesWithNaive(t *testing.T) {
	d := policytest.NewDice(1, 2)
	steps := map[policy.Step]int{}
	worlds := 50_000
	if testing.Short() { // by an emulator
		worlds /= 10
	}
	for range worlds {
		w := d.World()
		check(t, w)
		steps[w.Decide(true).Step]++
	}
	for s := policy.Undecided; s <= policy.BaselineAllow; s++ {
		if least := worlds / 100; steps[s] < least {
			t.Errorf("%d of the worlds were decided at %q, want %d at least: the dice have become poor", steps[s], s, least)
		}
	}
}

func FuzzDecide(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		d := policytest.NewDice(a, b)
		for range 100 {
			check(t, d.World())
		}
	})
}
