// Package policytest has worlds of policies for tests, made by dice, and a naive evaluator
// that decides on them by the text of the documentation:
//
//	d := policytest.NewDice(1, 2)
//	w := d.World()
//	want := w.Decide(false)
//	got := policy.NewCompiler(w.Policies, policytest.NetworkOf).Set(&w.Target).Decide(w.Request, w.Port, w.Verb)
//
// It is for tests only.
package policytest
